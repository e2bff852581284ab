"""The timeline of a `%%distributed` cell, from what its ranks noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbgpu.client.engines.calls import reference
from nbgpu.client.engines.results import collect
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.errors import ClusterError
from nbgpu.performance import cell_steps
from nbgpu.performance.clocks import ClockComparison, Clocks
from nbgpu.performance.timeline import Timeline
from nbgpu.protocol.calls import Call
from nbgpu.text.ranks import named_ranges

_PATIENCE_S = 20.0
"""A rank whose cell has ended answers at once, unless its device is still working."""


def taken(state: ClusterState, ranks: Sequence[int], stuck: Sequence[int], number: int) -> Timeline:
    """Take from the ranks what they noted in their last cell.

    Args:
        state: of the cluster whose ranks are back from the cell.
        ranks: those that ran it.
        stuck: those of them that did not come back.
        number: of the cell.

    Raises:
        ClusterError: a rank does not answer, or none has noted anything.
    """
    found = _called(state, Call.TAKE_CELL_TIMELINE, [rank for rank in ranks if rank not in stuck])
    notes: dict[int, dict[str, Any]] = {rank: own for rank, own in found.items() if own is not None}
    if not notes:
        raise ClusterError("no rank has noted anything")
    several = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    title = ", ".join(filter(None, [f"%%distributed on {several}", state.config.simulated]))
    clocks = _clocks(state, notes)
    steps = {number: cell_steps.cell_as_steps(number, notes, clocks)}
    lacking = sorted(set(ranks) - set(notes))
    return Timeline(title, steps, clocks, unit="cell", notes=list(_about(notes, lacking)))


def _about(notes: dict[int, dict[str, Any]], lacking: Sequence[int]) -> list[str]:
    lines = []
    num_kept, num_all = cell_steps.num_forgotten(notes.values())
    if num_kept < num_all:
        lines.append(f"the last {num_kept} of {num_all} collectives are shown")
    elif any(own["num_marks"] > len(own["marks"]) for own in notes.values()):
        lines.append("only the end of the cell is shown")
    if num_unseen := max(own["num_unseen"] for own in notes.values()):
        lines.append(
            f"{num_unseen} DDP model{'s have' if num_unseen > 1 else ' has'} a hook in C++: the buckets and the "
            "waiting for them are in the backward pass"
        )
    if lacking:
        lines.append(f"nothing is known of {named_ranges(lacking)}, which ended or did not come back")
    return lines


def _clocks(state: ClusterState, notes: dict[int, dict[str, Any]]) -> Clocks:
    if len({own["clock"] for own in notes.values()}) == 1:
        return Clocks()
    found = _called(state, Call.COMPARE_CLOCKS, range(state.world_size))[0]
    now_s = _called(state, Call.MONOTONIC_S, [0])[0]
    return Clocks(
        [ClockComparison(now_s, [offset_s for offset_s, _ in found], [error_s for _, error_s in found])]
    )


def _called(state: ClusterState, call: Call, ranks: Sequence[int]) -> dict[int, Any]:
    pending = {rank: state.ranks[rank].apply_async(reference(call)) for rank in ranks}
    return collect(pending, _PATIENCE_S)
