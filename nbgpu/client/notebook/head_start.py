"""Send a distributed cell to the ranks before IPython runs it in the notebook.

Before the first line of a cell runs, IPython transforms, parses and compiles the cell and stores it in its
history, which takes a good part of the time of an empty cell. For a `%%distributed` cell the result is known
beforehand, so the cell is sent first. If another library has registered an input transformer or a callback
that runs before each cell, the cell is not sent early.
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
"""The packages whose transformers and callbacks do not change a distributed cell."""

_Text = tuple[str, str]
"""The rest of the magic's line, and the code below it."""


class _Begun:
    """A cell that was sent to the ranks, or whose sending failed.

    Args:
        text: the text of the cell.
        send: the function that sends it.
        number: the number of the notebook's cell.
        interrupt: records a Stop until the cell runs.
    """

    def __init__(
        self, text: _Text, send: Callable[[str, str, int], DistributedCell], number: int, interrupt: Note
    ) -> None:
        """Send the cell. An error is kept for the caller of `claim`, because IPython shows it only from
        there."""
        self.text = text
        self._interrupt = interrupt
        self._cell: DistributedCell | None = None
        self._error: BaseException | None = None
        try:
            self._cell = send(*text, number)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is raised where the cell is to run
            self._error = error

    def claim(self) -> DistributedCell | None:
        """Hand over the cell to whoever runs it, or raise the error of sending it. The first caller gets it,
        any later one None."""
        cell, error = self._cell, self._error
        self._cell = self._error = None
        if error is not None:
            raise error
        if cell is not None and self._interrupt.interrupted:
            cell.note_stop()
        return cell

    def give_up(self) -> None:
        """Stop the ranks if nobody has claimed the cell; called when the notebook's cell is over."""
        if self._error is not None:
            _log.warning("a cell that was not run could not have been sent: %s", self._error)
        cell, self._cell = self._cell, None
        if cell is not None:
            try:
                cell.give_up()
            except NbgpuError as error:
                # The kernel must answer all the same, and the next cell reports the error, too.
                _log.warning("a cell that was not run was to be taken back from the ranks: %s", error)


_begun: ContextVar[_Begun | None] = ContextVar("nbgpu_begun", default=None)
_in_a_cell: ContextVar[bool] = ContextVar("nbgpu_in_a_cell", default=False)


def is_in_a_cell() -> bool:
    """Whether a cell of the notebook is running. Code that IPython transforms then is run by that cell, as a
    cell magic does with the code below it."""
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
        read: finds the text of a distributed cell in a cell's lines, or None in those of other cells.
        send: sends such a text as the notebook's cell of this number.
    """
    kernel = shell.kernel
    do_execute = kernel.do_execute
    # The switch is read once, because a Stop that comes before a cell's interrupts are recorded would cost
    # the cell its answer.
    are_sent_ahead = not are_plain()

    async def send_and_execute(code: str, silent: bool, *args: Any, **options: Any) -> Mapping[str, Any]:
        """Send a distributed cell to the ranks, and then have ipykernel execute it as any other cell."""
        if are_sent_ahead and magic in code and not silent:
            # Before and after the time in which ipykernel waits for the cell, and passes interrupts on to it,
            # an interrupt would be raised in the kernel's own loop, and the notebook would get no answer.
            with noted() as interrupt:
                text = read(_cleaned(shell, code)) if _nobody_else_has_a_say(shell) else None
                if text is not None:
                    begun = _Begun(text, send, shell.execution_count, interrupt)
                    return await executed(begun, code, silent, *args, **options)
        return await executed(None, code, silent, *args, **options)

    async def executed(begun: _Begun | None, *args: Any, **options: Any) -> Mapping[str, Any]:
        """Have ipykernel execute a cell, and give the magic within it access to the cell that was sent early.
        If nobody has claimed that cell by the end, its ranks are stopped."""
        token = _begun.set(begun)
        outside = _in_a_cell.set(False)
        try:
            answer: Mapping[str, Any] = await do_execute(*args, **options)
        finally:
            _begun.reset(token)
            _in_a_cell.reset(outside)
            if begun is not None:
                begun.give_up()
        return answer

    kernel.do_execute = send_and_execute
    shell.events.register("pre_run_cell", _note_begin)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    # `install` has set an attribute of the kernel object; without it the method of the kernel's class counts
    # again.
    vars(shell.kernel).pop("do_execute", None)
    shell.events.unregister("pre_run_cell", _note_begin)


def _nobody_else_has_a_say(shell: Any) -> bool:
    """Return whether only known packages transform cells or are called before one, so that the text of a
    distributed cell is certain before IPython has transformed it."""
    callbacks = shell.events.callbacks
    asked = [
        *shell.input_transformer_manager.cleanup_transforms,
        *callbacks["pre_execute"],
        *callbacks["pre_run_cell"],
    ]
    return all(_package(one) in _PACKAGES for one in asked)


def _package(callback: Any) -> str:
    """The package of a callback; empty where it has none, such as a list's `append`."""
    return (callback.__module__ or "").partition(".")[0]


def _cleaned(shell: Any, code: str) -> list[str]:
    """The cell's lines without copied prompts, empty lines and indentation."""
    lines = code.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for transform in shell.input_transformer_manager.cleanup_transforms:
        if _package(transform) == "IPython":
            lines = transform(lines)
    return lines
