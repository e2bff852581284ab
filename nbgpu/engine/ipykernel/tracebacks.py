"""Tracebacks of cells that show the person's own code and leave out the libraries'.

IPython reads and parses every source file of a traceback. For torch these are tens of thousands of lines, and
a rank that failed in a collective would take seconds to report it while all others wait. The person can
change only their own lines anyway; the message below them is the library's.
"""

from __future__ import annotations

import os
import re
import sys
from asyncio import CancelledError
from collections.abc import Sequence
from itertools import islice
from traceback import extract_tb
from types import FrameType, TracebackType
from typing import Any

import IPython
from IPython.core.compilerop import code_name
from IPython.core.error import UsageError

from nbgpu.engine.frames import (
    RUNS_A_CALL,
    called_collective,
    chain_of,
    codes,
    empty_library_frames,
    error_as_text,
    is_function,
    is_library,
    is_ours,
    num_left_out_in_words,
    own_part,
)
from nbgpu.engine.group import collective_timeout
from nbgpu.engine.ipykernel import ended_groups, forked, script_lines
from nbgpu.engine.memory import dev_shm
from nbgpu.engine.memory.limit import undisturbed
from nbgpu.machine import interpreter

full = False
"""Whether the running cell's tracebacks show libraries' frames too."""

_UNKNOWN_ARGUMENTS = "(***failed resolving arguments***)"
"""IPython's text for the arguments of a function whose frame was cleared."""


_COLOR = r"(?:\x1b\[[0-9;]*m)*"
_ARROW = re.compile(rf"^{_COLOR}-+> ?{_COLOR}(\d+)", re.MULTILINE)

_numbers: dict[str, int] = {}
"""The number of each cell, by the name of its file."""


def install(shell: Any) -> None:
    """Make the engine's shell show only the person's part of tracebacks."""
    name_cells(shell)
    _show_unless_a_cell_has_a_handler(shell)
    _print_errors_that_end_no_cell(shell)
    show = shell.showtraceback
    rank_pid = os.getpid()

    def show_persons_part(*args: Any, **options: Any) -> None:
        """Show the error of a function that the client has sent without ipyparallel's frames, and let IPython
        show any other error."""
        _, error, traceback = sys.exc_info()
        if isinstance(error, SystemExit) and os.getpid() != rank_pid:
            forked.end_child(error)
        elif (
            not args
            and not options
            and isinstance(error, Exception)
            and own_part(traceback)[0] is not traceback
        ):
            _show(shell, type(error), error, traceback, is_cell=False)
        else:
            show(*args, **options)

    shell.showtraceback = show_persons_part
    shell.events.register("post_run_cell", _make_presentable)


def _show_unless_a_cell_has_a_handler(shell: Any) -> None:
    """Have `_show` show errors, except those for which a cell sets a handler with `set_custom_exc`."""
    kinds = (Exception, KeyboardInterrupt, CancelledError)
    set_custom_exc = shell.set_custom_exc
    set_custom_exc(kinds, _show)

    def set_custom_exc_of_a_cell(of_the_cell: tuple[type[BaseException], ...], handler: Any) -> None:
        """Take over `set_custom_exc`: call the cell's handler for its kinds of errors, and `_show` for all
        others."""

        def handle(shell: Any, kind: type[BaseException], *args: Any, **options: Any) -> Any:
            chosen = handler if issubclass(kind, of_the_cell) else _show
            return chosen(shell, kind, *args, **options)

        # IPython has room for one handler, so this one calls the cell's.
        is_removed = handler is None or of_the_cell == ()
        set_custom_exc(kinds if is_removed else (*kinds, *of_the_cell), _show if is_removed else handle)

    shell.set_custom_exc = set_custom_exc_of_a_cell


def _print_errors_that_end_no_cell(shell: Any) -> None:
    """Print the tracebacks that are shown while a cell goes on: of a widget's callback, of a block below
    `with ipywidgets.Output()`, of `%tb`, of a script. The notebook shows only the error that ends a cell, and
    no message of a forked child."""
    show = shell._showtraceback
    rank_pid = os.getpid()

    def show_or_print(kind: type[BaseException], error: BaseException, lines: list[str]) -> None:
        """Let IPython show the error that ends the cell, and print any other."""
        fails_in_showing = getattr(shell.displayhook, "msg", None) is not None
        if os.getpid() == rank_pid and (fails_in_showing or _ends_cell(sys._getframe(1))):
            show(kind, error, lines)
        else:
            print("\n".join(lines), file=sys.stderr)  # noqa: T201 - the cell's output

    shell._showtraceback = show_or_print


def _ends_cell(frame: FrameType | None) -> bool:
    """Return whether IPython itself, and not the person's code, has called a function that shows an error:
    then the error ends the cell."""
    while frame is not None and (
        is_ours(frame.f_code.co_filename) or "/IPython/" in frame.f_code.co_filename
    ):
        if frame.f_code.co_name in ("run_code", "run_cell_async"):
            return True
        frame = frame.f_back
    return frame is not None and is_function(frame, RUNS_A_CALL)


def _make_presentable(result: Any) -> None:
    if result is not None and result.error_in_exec is not None:
        result.error_in_exec = _presentable(result.error_in_exec)


def _presentable(error: BaseException) -> BaseException:
    """Return the error to show to the person and send to the client: mostly `error` itself.

    A CollectiveTimeoutError takes the place of torch's error after a collective that took too long, a
    RuntimeError that of torch's error about a group that has ended, and a plain exception that of one whose
    `__str__` fails, because ipykernel would fail on it and never reply.
    """
    error = collective_timeout.explain(error)
    try:
        if message := ended_groups.about(error):
            return RuntimeError(message).with_traceback(error.__traceback__)
    except Exception as failure:  # noqa: BLE001 - whatever the person's __str__ raises
        stand_in: type[Exception] = type(type(error).__name__, (Exception,), {})
        message = f"(what it says cannot be shown: its __str__ raised {type(failure).__name__})"
        return stand_in(message).with_traceback(error.__traceback__)
    return error


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    traceback: Any,
    tb_offset: Any = None,
    is_cell: bool = True,
) -> Any:
    """Show an error with the person's part of its traceback; return the lines."""
    with undisturbed():
        error = _presentable(error)
        interpreter.note_namesakes(error)
        lines = [f"UsageError: {error}"] if kind is UsageError else _lines(shell, error, traceback, is_cell)
        shell._showtraceback(type(error), error, lines)
        return lines


def _lines(shell: Any, error: BaseException, traceback: TracebackType, is_cell: bool) -> list[str]:
    """Return the lines of a traceback: the person's own frames, the number of frames left out, and advice
    about the line that failed.

    The frames of libraries are emptied, so that the error keeps none of their variables alive.
    """
    shown_part, num_left_out = _part_to_show(traceback, full and is_cell)
    advice = dev_shm.advice() if dev_shm.is_full(error) else script_lines.advice(error, traceback)
    collective = called_collective(codes(traceback))
    empty_library_frames(traceback)
    # IPython formats the error a second time, for its history.
    error.__traceback__ = shown_part
    for cause in islice(chain_of(error), 1, None):
        empty_library_frames(cause.__traceback__)
        cause.__traceback__, _ = _part_to_show(cause.__traceback__, full and is_cell)
    has_group = any(isinstance(raised, BaseExceptionGroup) for raised in chain_of(error))
    lines: list[str]
    if isinstance(error, SyntaxError):
        # A SyntaxError of the cell itself comes from no line of the person's code: it has its own line.
        entries = [entry for entry in extract_tb(shown_part) if not is_library(entry.filename)]
        lines = shell.SyntaxTB.structured_traceback(type(error), error, entries)
    elif has_group:
        # IPython would leave the errors of the group out.
        lines = error_as_text(error).rstrip().splitlines()
    else:
        lines = shell.InteractiveTB.structured_traceback(type(error), error, shown_part, tb_offset=0)
    lines = [line.replace(_UNKNOWN_ARGUMENTS, "(...)") for line in with_cell_names(lines)]
    if num_left_out and not has_group:
        where = f"in {collective} of torch.distributed: " if collective else ""
        how_to_see = "; %%distributed --full shows all" if is_cell else ""
        lines.insert(-1, f"    ({where}{num_left_out_in_words(num_left_out)}{how_to_see})\n")
    shown = "\n".join(lines)
    # IPython 7 leaves out what `add_note` has added. A person may have set `__notes__` to anything.
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        lines += [note for note in notes if isinstance(note, str) and note not in shown]
    return [*lines, advice] if advice else lines


def _part_to_show(traceback: TracebackType | None, whole: bool) -> tuple[TracebackType | None, int]:
    """Return the part of a traceback to show, and the number of frames left out of it.

    Args:
        traceback: the whole traceback.
        whole: whether to show libraries' frames too, from the person's first frame on.
    """
    if not whole:
        return own_part(traceback)
    from_first_own = traceback
    while from_first_own is not None and is_library(from_first_own.tb_frame.f_code.co_filename):
        from_first_own = from_first_own.tb_next
    return from_first_own or traceback, 0


def name_cells(shell: Any) -> None:
    """Name cells by their number and code from now on: in tracebacks 'Cell In[3], line 2', elsewhere, as in
    warnings and in tracebacks of threads, '<ipython-input-3-0d3a5c18e2f4>'.

    ipykernel names a cell by a file with the process's number in it, so that the same warning on two ranks
    would be two, and nobody would know which cell is meant. IPython's own name is the same on all ranks, and
    libraries such as numba and joblib know it. IPython 7 writes this name into tracebacks, too; newer ones
    write 'Cell In[3]'.
    """

    def name_cell(raw_code: str, _code: str, number: int) -> str:
        name: str = code_name(raw_code, number)
        if IPython.version_info < (8,):
            _numbers[name] = number
        return name

    shell.compile.get_code_name = name_cell


def with_cell_names(lines: Sequence[str]) -> list[str]:
    """Return the parts of a traceback, frames and lines, with 'Cell In[3]' in place of the names of cells'
    files."""
    return [_named(part) for part in lines] if _numbers else [*lines]


def _named(part: str) -> str:
    """Replace the names of cells' files in a part of a traceback by 'Cell In[3]', as newer versions of
    IPython write them."""
    for name, number in _numbers.items():
        if name not in part:
            continue
        arrow = _ARROW.search(part)
        cell = f"Cell In[{number}]"
        # The header of a frame: its line stands beside the arrow below.
        header = rf"{_COLOR}{re.escape(name)}{_COLOR} in {_COLOR}(?P<function>[^\x1b(\n]+)"
        part = re.sub(
            rf"{header}{_COLOR}(?P<arguments>\([^\n]*\))",
            lambda header, cell=cell, arrow=arrow: _frame(cell, arrow, header),  # type: ignore[misc]
            part,
        )
        part = re.sub(rf'File {_COLOR}"{re.escape(name)}"{_COLOR}, line', f"{cell}, line", part)
        part = part.replace(name, cell)
    return part


def _frame(cell: str, arrow: re.Match[str] | None, header: re.Match[str]) -> str:
    """Return IPython 7's header of a frame as newer versions write it, such as 'Cell In[3], line 2, in
    fit(x)'; code of the cell itself has no function.

    Args:
        cell: 'Cell In[3]'.
        arrow: the match of the arrow before the failing line, with its number; None if no line is shown.
        header: the match of IPython's own header.
    """
    place = f"{cell}, line {arrow[1]}" if arrow else cell
    if header["function"].startswith("<cell line"):
        return place
    return f"{place}, in {header['function']}{header['arguments']}"
