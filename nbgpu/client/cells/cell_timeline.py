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


def collect_timeline(
    state: ClusterState, ranks: Sequence[int], stuck: Sequence[int], number: int
) -> Timeline:
    """Collect the notes that the ranks took in their last cell, and make a timeline of them.

    Args:
        state: the state of the cluster, whose ranks are back from the cell.
        ranks: the ranks that ran the cell.
        stuck: the ranks among these that did not come back.
        number: the number of the cell.

    Raises:
        ClusterError: a rank does not answer, or none has noted anything.
    """
    answers = _call(state, Call.TAKE_CELL_TIMELINE, [rank for rank in ranks if rank not in stuck])
    notes: dict[int, dict[str, Any]] = {
        rank: answer for rank, answer in answers.items() if answer is not None
    }
    if not notes:
        raise ClusterError("no rank has noted anything")
    several = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    title = ", ".join(filter(None, [f"%%distributed on {several}", state.config.simulated]))
    clocks = _clocks(state, notes)
    steps = {number: cell_steps.cell_as_steps(number, notes, clocks)}
    lacking = sorted(set(ranks) - set(notes))
    return Timeline(title, steps, clocks, unit="cell", notes=_describe_gaps(notes, lacking))


def _describe_gaps(notes: dict[int, dict[str, Any]], lacking: Sequence[int]) -> list[str]:
    """Return sentences about what the timeline does not show."""
    lines = []
    num_kept, num_all = cell_steps.num_forgotten(notes.values())
    if num_kept < num_all:
        lines.append(f"the last {num_kept} of {num_all} collectives are shown")
    elif any(note["num_marks"] > len(note["marks"]) for note in notes.values()):
        lines.append("only the end of the cell is shown")
    if num_unseen := max(note["num_unseen"] for note in notes.values()):
        lines.append(
            f"{num_unseen} DDP model{'s have' if num_unseen > 1 else ' has'} a hook in C++: the buckets and the "
            "waiting for them are in the backward pass"
        )
    if lacking:
        lines.append(f"nothing is known of {named_ranges(lacking)}, which ended or did not come back")
    return lines


def _clocks(state: ClusterState, notes: dict[int, dict[str, Any]]) -> Clocks:
    """Compare the clocks of the ranks, unless all have the same one."""
    if len({note["clock"] for note in notes.values()}) == 1:
        return Clocks()
    # Rank 0's answer has the offset of every rank's clock and the error of that offset, in seconds.
    offsets = _call(state, Call.COMPARE_CLOCKS, range(state.world_size))[0]
    now_s = _call(state, Call.MONOTONIC_S, [0])[0]
    return Clocks(
        [ClockComparison(now_s, [offset_s for offset_s, _ in offsets], [error_s for _, error_s in offsets])]
    )


def _call(state: ClusterState, call: Call, ranks: Sequence[int]) -> dict[int, Any]:
    pending = {rank: state.ranks[rank].apply_async(reference(call)) for rank in ranks}
    return collect(pending, _PATIENCE_S)
