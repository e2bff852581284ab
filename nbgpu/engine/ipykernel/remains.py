"""State that a cell or a call leaves behind and that must be repaired before the next one.

The metadata of the reply name this state, so that the client needs no further request to learn of it. The
client forms a group again that was ended; the engine restores the signal handlers that it needs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nbgpu.engine.group import group
from nbgpu.engine.ipykernel import interrupts, stacks
from nbgpu.protocol.records import Remains

_last_cell_failed = False


def install(shell: Any) -> None:
    """Note how each cell ends."""
    shell.events.register("post_run_cell", _note_end_of_cell)


def _note_end_of_cell(result: Any) -> None:
    global _last_cell_failed
    _last_cell_failed = not result.success


def last_cell_failed() -> bool:
    """Return whether this rank's last cell raised, and the group was not formed again since. A client calls
    this when it attaches."""
    return _last_cell_failed


def forget_failure() -> None:
    """Note that the group was formed again after the last cell."""
    global _last_cell_failed
    _last_cell_failed = False


def complete(metadata: dict[str, Any]) -> None:
    """Put into the metadata of a reply which state the cell has left behind that must be repaired."""
    group_ended, is_cut_off = group.has_ended(), group.is_cut_off()
    taken = ["SIGINT"] if interrupts.is_handler_replaced() else []
    if stacks.is_signal_replaced():
        taken.append(stacks.STACK_SIGNAL.name)
    if group_ended or is_cut_off or taken:
        metadata[Remains.METADATA] = asdict(Remains(group_ended, is_cut_off, tuple(taken)))
