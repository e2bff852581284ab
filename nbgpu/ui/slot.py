"""Outputs of a notebook that are replaced later: how the kernel and a page find them."""

from __future__ import annotations

import uuid
from typing import Any


def new_slot() -> str:
    """An id for an output that will be replaced."""
    return f"nbgpu-{uuid.uuid4().hex}"


def slot_metadata(slot: str, final: str = "") -> dict[str, Any]:
    """What marks an output in the notebook, so that a page can find it.

    Args:
        slot: the output's display_id.
        final: what tells the final output from the one that is to be replaced; empty while it is not there.
    """
    return {"nbgpu": {"slot": slot, "final": final}}
