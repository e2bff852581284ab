"""Send a distributed cell to the ranks before IPython runs it in the notebook.

Before the first line of a cell runs, IPython transforms, parses and compiles the cell and stores it in its
history, which takes a good part of the time of an empty cell. None of this changes what a `%%distributed`
cell sends to the ranks, so the cell is sent before. It is not sent early if another library has registered an
input transformer or a callback that runs before each cell, because those might change the cell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from nbgpu.client.cells.cell import DistributedCell
from nbgpu.errors import NbgpuError
from nbgpu.machine.signals import Note, noted
from nbgpu.protocol.short_cuts import are_plain

_log = logging.getLogger("nbgpu.cluster")

_PACKAGES = {"IPython", "ipykernel", "matplotlib_inline", "nbgpu"}
"""The packages whose transformers and callbacks leave what a distributed cell sends to the ranks as it is."""

_Text = tuple[str, str]
"""The rest of the magic's line, and the code below it."""


class _Begun:
    """A cell that was sent early, or whose sending failed.

    Args:
        text: the text of the cell.
        send: the function that sends it.
        number: the number of the notebook's cell, as in `In [12]`.
        interrupt: records an interrupt that comes before the cell runs.
    """

    def __init__(
        self, text: _Text, send: Callable[[str, str, int], DistributedCell], number: int, interrupt: Note
    ) -> None:
        """Send the cell. An error is kept and raised by `claim`, while the cell runs, because IPython shows
        only errors of a running cell."""
        self.text = text
        self._interrupt = interrupt
        self._cell: DistributedCell | None = None
        self._error: BaseException | None = None
        try:
            self._cell = send(*text, number)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - `claim` raises it
            self._error = error

    def claim(self) -> DistributedCell | None:
        """Return the cell to the first caller, which then shows it, or raise the error of sending it; return
        None to later callers."""
        cell, error = self._cell, self._error
        self._cell = self._error = None
        if error is not None:
            raise error
        if cell is not None and self._interrupt.interrupted:
            cell.note_stop()
        return cell

    def give_up(self) -> None:
        """Interrupt the cell on the ranks, unless it was claimed. Called when the notebook's cell is over, or
        when it turns out to send another text than this one."""
        error, self._error = self._error, None
        if error is not None:
            _log.warning("a cell could not be sent early, and was then not run: %s", error)
        cell, self._cell = self._cell, None
        if cell is not None:
            try:
                cell.give_up()
            except NbgpuError as error:
                # Not raised: the kernel must still reply to the notebook, and the next cell raises it again.
                _log.warning("a cell that was sent early, and then not run, could not be stopped: %s", error)


_begun: ContextVar[_Begun | None] = ContextVar("nbgpu_begun", default=None)
_in_a_cell: ContextVar[bool] = ContextVar("nbgpu_in_a_cell", default=False)


def is_in_a_cell() -> bool:
    """Whether a cell of the notebook is running. Code that IPython transforms meanwhile is part of that cell,
    such as the code below a cell magic."""
    return _in_a_cell.get()


def _note_begin(_: Any) -> None:
    _in_a_cell.set(True)


def claim_cell(line: str, code: str) -> DistributedCell | None:
    """Return the cell with this text if it was sent early, else None; raise the error of sending it.

    Args:
        line: the rest of the magic's line.
        code: the code below it.
    """
    begun = _begun.get()
    if begun is None:
        return None
    if begun.text != (line, code):
        begun.give_up()
        return None
    return begun.claim()


def install(
    shell: Any,
    magic: str,
    read: Callable[[list[str]], _Text | None],
    send: Callable[[str, str, int], DistributedCell],
) -> None:
    """Make this shell's kernel send distributed cells early.

    Args:
        shell: the kernel's shell.
        magic: the magic that every distributed cell contains.
        read: returns the text of a distributed cell from a cell's lines; None for other cells.
        send: sends such a text as the notebook's cell of this number.
    """
    kernel = shell.kernel
    do_execute = kernel.do_execute
    # Called once here, because an interrupt during a call outside of `noted` would cost the cell its reply.
    is_enabled = not are_plain()

    async def send_and_execute(code: str, silent: bool, *args: Any, **options: Any) -> Mapping[str, Any]:
        """Send a distributed cell to the ranks, and then have ipykernel execute it as any other cell."""
        if is_enabled and magic in code and not silent:
            # ipykernel passes interrupts on to the cell only while it awaits the cell. Before and after, an
            # interrupt would be raised in the kernel's own loop, and the notebook would get no reply.
            with noted() as interrupt:
                text = read(_cleaned(shell, code)) if _is_unchanged_by_others(shell) else None
                if text is not None:
                    begun = _Begun(text, send, shell.execution_count, interrupt)
                    return await execute(begun, code, silent, *args, **options)
        return await execute(None, code, silent, *args, **options)

    async def execute(begun: _Begun | None, *args: Any, **options: Any) -> Mapping[str, Any]:
        """Have ipykernel execute a cell, in which `claim_cell` returns the cell that was sent early. If that
        was not claimed by the end, its ranks are stopped."""
        begun_token = _begun.set(begun)
        in_a_cell_token = _in_a_cell.set(False)
        try:
            reply: Mapping[str, Any] = await do_execute(*args, **options)
        finally:
            _begun.reset(begun_token)
            _in_a_cell.reset(in_a_cell_token)
            if begun is not None:
                begun.give_up()
        return reply

    kernel.do_execute = send_and_execute
    shell.events.register("pre_run_cell", _note_begin)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    # Without the object's attribute, the method of the kernel's class is found again.
    vars(shell.kernel).pop("do_execute", None)
    shell.events.unregister("pre_run_cell", _note_begin)


def _is_unchanged_by_others(shell: Any) -> bool:
    """Return whether only the packages in `_PACKAGES` transform cells or run code before them, so that
    IPython will not change the text of a distributed cell."""
    callbacks = shell.events.callbacks
    functions = [
        *shell.input_transformer_manager.cleanup_transforms,
        *callbacks["pre_execute"],
        *callbacks["pre_run_cell"],
    ]
    return all(_package(function) in _PACKAGES for function in functions)


def _package(function: Any) -> str:
    """Return the package of a function; empty if it has none, such as a list's `append`."""
    return (function.__module__ or "").partition(".")[0]


def _cleaned(shell: Any, code: str) -> list[str]:
    """Return the cell's lines without copied prompts, empty lines at the top and indentation."""
    lines = code.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for transform in shell.input_transformer_manager.cleanup_transforms:
        # Not nbgpu's own transformer, which would turn the cell into an awaited call.
        if _package(transform) == "IPython":
            lines = transform(lines)
    return lines
