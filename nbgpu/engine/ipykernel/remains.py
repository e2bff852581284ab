"""State that a cell or a call leaves behind and that must be repaired before the next one.

The reply to the client says what must be repaired, which takes no request of its own. The client forms a
group again that was ended; the engine restores the signal handlers that it needs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nbgpu.engine.group import group, straggler
from nbgpu.engine.ipykernel import interrupts, stacks
from nbgpu.protocol.records import Remains


def clear_before_each_request(kernel: Any) -> None:
    """Restore the engine's signal handlers before each request, and say in each reply what must be
    repaired."""
    finish_metadata = kernel.finish_metadata

    def take_signals_back() -> None:
        interrupts.take_back()
        stacks.take_signal_back()
        straggler.begin()

    def finish_and_tell(request: Any, metadata: Any, answer: Any) -> Any:
        metadata = finish_metadata(request, metadata, answer)
        group_ended, is_cut_off = group.has_ended(), group.is_cut_off()
        taken = ["SIGINT"] if interrupts.is_taken() else []
        if stacks.signal_is_taken():
            taken.append(stacks.STACK_SIGNAL.name)
        if group_ended or is_cut_off or taken:
            metadata[Remains.METADATA] = asdict(Remains(group_ended, is_cut_off, tuple(taken)))
        return metadata

    kernel.pre_handler_hook = take_signals_back
    kernel.finish_metadata = finish_and_tell
