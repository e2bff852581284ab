"""An answer says what the cell or call left behind that the next one must not find: it costs no request of its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nbgpu.engine import group, interrupts
from nbgpu.records import Remains


def tell_with_each_answer(kernel: Any) -> None:
    """Adds what remains to the metadata of the engine's answers."""
    finish_metadata = kernel.finish_metadata

    def finish_and_tell(request: Any, metadata: Any, answer: Any) -> Any:
        metadata = finish_metadata(request, metadata, answer)
        group_ended, taken = group.has_ended(), interrupts.taken_signals()
        if group_ended or taken:
            metadata[Remains.METADATA] = asdict(Remains(group_ended, taken))
        return metadata

    kernel.finish_metadata = finish_and_tell
