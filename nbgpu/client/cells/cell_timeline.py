"""The timeline of a `%%distributed` cell, from the records of its ranks."""

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
from nbgpu.text.ranks import count_of_ranks, named_ranges

_PATIENCE_S = 20.0
"""How long a rank may take to answer after its cell has ended, because its device may still be working."""


def collect_timeline(
    state: ClusterState, ranks: Sequence[int], stuck: Sequence[int], number: int
) -> Timeline:
    """Collect what the ranks recorded in their last cell, and make a timeline of it.

    Args:
        state: the state of the cluster, whose ranks are back from the cell.
        ranks: the ranks that ran the cell.
        stuck: the ranks among these that did not come back.
        number: the number of the cell.

    Raises:
        ClusterError: a rank does not answer, or none has recorded anything.
    """
    answers = _call(state, Call.TAKE_CELL_TIMELINE, [rank for rank in ranks if rank not in stuck])
    records: dict[int, dict[str, Any]] = {
        rank: answer for rank, answer in answers.items() if answer is not None
    }
    if not records:
        raise ClusterError("no rank has noted anything")
    on_ranks = f"%%distributed on {count_of_ranks(len(ranks))}"
    title = ", ".join(filter(None, [on_ranks, state.config.simulated]))
    clocks = _clocks(state, records)
    steps = {number: cell_steps.cell_as_steps(number, records, clocks)}
    without = sorted(set(ranks) - set(records))
    return Timeline(title, steps, clocks, unit="cell", notes=_describe_gaps(records, without))


def _describe_gaps(records: dict[int, dict[str, Any]], without: Sequence[int]) -> list[str]:
    """Return sentences about what the timeline does not show; `without` are the ranks without records."""
    lines = []
    num_kept, num_all = cell_steps.num_forgotten(records.values())
    if num_kept < num_all:
        lines.append(f"the last {num_kept} of {num_all} collectives are shown")
    elif any(record["num_marks"] > len(record["marks"]) for record in records.values()):
        lines.append("only the end of the cell is shown")
    if num_unseen := max(record["num_unseen"] for record in records.values()):
        lines.append(
            f"{num_unseen} DDP model{'s have' if num_unseen > 1 else ' has'} a hook in C++: the buckets and the "
            "waiting for them are in the backward pass"
        )
    if without:
        lines.append(f"nothing is known of {named_ranges(without)}, which ended or did not come back")
    return lines


def _clocks(state: ClusterState, records: dict[int, dict[str, Any]]) -> Clocks:
    """Compare the clocks of the ranks, unless all have the same one."""
    if len({record["clock"] for record in records.values()}) == 1:
        return Clocks()
    # Rank 0's answer has (the offset of the clock, the error of that offset) for every rank, in seconds.
    offsets_s, errors_s = zip(*_call(state, Call.COMPARE_CLOCKS, range(state.world_size))[0], strict=True)
    now_s = _call(state, Call.MONOTONIC_S, [0])[0]
    return Clocks([ClockComparison(now_s, offsets_s, errors_s)])


def _call(state: ClusterState, call: Call, ranks: Sequence[int]) -> dict[int, Any]:
    pending = {rank: state.ranks[rank].apply_async(reference(call)) for rank in ranks}
    return collect(pending, _PATIENCE_S)
