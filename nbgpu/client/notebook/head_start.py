"""The ranks begin with a cell while IPython is still about to run it.

Before the first line of a cell runs, IPython rewrites, parses and compiles it and keeps it in its history, which is a good part of
the time that an empty one takes. What comes out of that is known beforehand for a `%%distributed` cell, so it is sent first. Where
somebody else has a say, an input transformer or a callback that comes before each cell, the ranks wait for these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from nbgpu.client.cells.cell import DistributedCell
from nbgpu.errors import NbgpuError
from nbgpu.machine.signals import Note, noted
from nbgpu.protocol.plain_cells import are_plain

_log = logging.getLogger("nbgpu.cluster")

_PACKAGES = {"IPython", "ipykernel", "matplotlib_inline", "nbgpu"}
"""Those whose transformers and callbacks do not mind."""

_Text = tuple[str, str]
"""What stands behind the magic's name, and what stands below it."""


class _Begun:
    """A cell that is on its way to the ranks, or could not be sent.

    Args:
        text: the cell's.
        send: sends it.
        number: of the notebook's cell.
        interrupt: notes a Stop until the cell runs.
    """

    def __init__(
        self, text: _Text, send: Callable[[str, str, int], DistributedCell], number: int, interrupt: Note
    ) -> None:
        self.text = text
        self._interrupt = interrupt
        self._cell: DistributedCell | None = None
        self._error: BaseException | None = None
        try:
            self._cell = send(*text, number)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is raised where the cell is to run
            self._error = error

    def take(self) -> DistributedCell | None:
        """The cell, once; raises what came of sending it."""
        cell, error = self._cell, self._error
        self._cell = self._error = None
        if error is not None:
            raise error
        if cell is not None and self._interrupt.interrupted:
            cell.note_stop()
        return cell

    def give_up(self) -> None:
        """Called when nobody will take it any more: if nobody has, the ranks are stopped."""
        if self._error is not None:
            _log.warning("a cell that was not run could not have been sent: %s", self._error)
        cell, self._cell = self._cell, None
        if cell is not None:
            try:
                cell.give_up()
            except NbgpuError as error:
                # The kernel must answer all the same, and the next cell says it, too.
                _log.warning("a cell that was not run was to be taken back from the ranks: %s", error)


_begun: ContextVar[_Begun | None] = ContextVar("nbgpu_begun", default=None)
_in_a_cell: ContextVar[bool] = ContextVar("nbgpu_in_a_cell", default=False)


def is_in_a_cell() -> bool:
    """Whether the notebook's cell is running, so that what is translated now is code that it runs: a cell magic does that
    with what stands below it."""
    return _in_a_cell.get()


def _note_begin(_: Any) -> None:
    _in_a_cell.set(True)


def take(line: str, code: str) -> DistributedCell | None:
    """The cell with this text, if the ranks have it already; raises what came of sending it."""
    begun = _begun.get()
    if begun is None:
        return None
    if begun.text != (line, code):
        begun.give_up()
        return None
    return begun.take()


def install(
    shell: Any,
    magic: str,
    read: Callable[[list[str]], _Text | None],
    send: Callable[[str, str, int], DistributedCell],
) -> None:
    """From now on the cells of this shell's kernel are sent ahead.

    Args:
        shell: the kernel's.
        magic: what every distributed cell has in it.
        read: finds the text of a distributed cell in a cell's lines, None in those of others.
        send: sends such a text, as the notebook's cell of this number.
    """
    kernel = shell.kernel
    do_execute = kernel.do_execute
    # Asked once: whatever runs before a cell's interrupts are noted is a moment in which a Stop would cost the cell its answer.
    are_sent_ahead = not are_plain()

    async def send_and_execute(code: str, silent: bool, *args: Any, **options: Any) -> Mapping[str, Any]:
        if are_sent_ahead and magic in code and not silent:
            # Before ipykernel waits for the cell, which hears of interrupts then, and after that, one would be raised in the
            # kernel's own loop, and the notebook would get no answer.
            with noted() as interrupt:
                text = read(_cleaned(shell, code)) if _nobody_else_has_a_say(shell) else None
                if text is not None:
                    begun = _Begun(text, send, shell.execution_count, interrupt)
                    return await executed(begun, code, silent, *args, **options)
        return await executed(None, code, silent, *args, **options)

    async def executed(begun: _Begun | None, *args: Any, **options: Any) -> Mapping[str, Any]:
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
    """Takes that back."""
    vars(shell.kernel).pop("do_execute", None)
    shell.events.unregister("pre_run_cell", _note_begin)


def _nobody_else_has_a_say(shell: Any) -> bool:
    callbacks = shell.events.callbacks
    asked = [
        *shell.input_transformer_manager.cleanup_transforms,
        *callbacks["pre_execute"],
        *callbacks["pre_run_cell"],
    ]
    return all(_package(one) in _PACKAGES for one in asked)


def _package(callback: Any) -> str:
    """Where it comes from; empty for one that does not know, such as a list's `append`."""
    return (callback.__module__ or "").partition(".")[0]


def _cleaned(shell: Any, code: str) -> list[str]:
    """The cell's lines, without prompts, empty lines and indentation that were copied along."""
    lines = code.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    for transform in shell.input_transformer_manager.cleanup_transforms:
        if _package(transform) == "IPython":
            lines = transform(lines)
    return lines
