"""Breaks down the time of a rank's steps, from the intervals of a profiler's trace.

A moment of a step belongs to exactly one part, so that the parts add up to the step. On a CPU a moment
belongs to the part in which the main thread is, or to communication while that thread waits for the other
ranks. On a GPU a moment belongs to the part in which the host launched the running kernel, or to
communication while only NCCL's kernels run. Communication that overlaps with computing costs the step
nothing: it is hidden.

The names are those of torch's traces (Kineto): 'gloo:all_reduce' on gloo's own threads, 'ncclDevKernel_...'
among the kernels, and `record_function`'s ranges.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Literal

Part = Literal["data", "agreement", "forward", "waiting", "backward", "optimizer", "other"]
"""The parts that the trainer marks. 'agreement' sends the message of consensus.py, 'waiting' waits for it."""

PREFIX = "nbgpu."
"""The prefix of the trainer's ranges, such as 'nbgpu.forward'; 'nbgpu.step' contains the others."""

_COMPUTED: tuple[Part, ...] = ("forward", "backward", "optimizer")
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})

Interval = tuple[float, float]
Intervals = list[Interval]
"""Intervals that are disjoint and in order."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The mean step of a rank, in seconds; all but `hidden_s` add up to `step_s`."""

    num_steps: int
    step_s: float
    data_s: float
    """The time until the batches were there."""
    forward_s: float
    backward_s: float
    communication_s: float
    """Communication that is not hidden: the rank does nothing else meanwhile."""
    optimizer_s: float
    other_s: float
    hidden_s: float
    """Communication that overlaps with computing; it is in none of the other parts."""

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def in_words(self) -> str:
        """Return a text such as '42 ms a step: data 2.0 %, forward 31.0 %, ...'."""
        names = ("data", "forward", "backward", "communication", "optimizer", "other")
        shares = [f"{name} {100 * getattr(self, f'{name}_s') / self.step_s:.1f} %" for name in names]
        hidden = f"beside it {100 * self.hidden_s / self.step_s:.1f} % of communication that is hidden"
        return f"{1000 * self.step_s:.1f} ms a step: {', '.join(shares)}; {hidden}"


def breakdown(events: Iterable[Mapping[str, Any]]) -> Breakdown:
    """Return a breakdown of the time of the steps in a trace.

    Args:
        events: the `traceEvents` of a Chrome trace that torch wrote, with the trainer's ranges in it.

    Raises:
        ValueError: there is no step in it.
    """
    # Those with a begin and a duration.
    complete = [event for event in events if event.get("ph") == "X"]
    ranges: dict[str, Intervals] = {}
    thread = None
    for event in complete:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
            ranges.setdefault(event["name"].removeprefix(PREFIX), []).append(_interval(event))
            thread = event["tid"]
    num_steps = len(ranges.get("step", []))
    if not num_steps:
        raise ValueError("the trace has no step in it")
    steps = union(ranges.pop("step"))
    parts = {name: union(intervals) for name, intervals in ranges.items()}
    on_gpu = [event for event in complete if event.get("cat") in _KERNELS]
    # The intervals of each part, and those of hidden communication.
    if on_gpu:
        spent, hidden = _on_gpu(on_gpu, complete, parts, steps)
    else:
        spent, hidden = _on_cpu(complete, thread, parts, steps)
    # The times of the trace are in microseconds.
    mean_s = {name: total(intersect(moments, steps)) / num_steps / 1e6 for name, moments in spent.items()}
    step_s = total(steps) / num_steps / 1e6
    return Breakdown(
        num_steps,
        step_s,
        other_s=max(step_s - sum(mean_s.values()), 0.0),
        hidden_s=total(intersect(hidden, steps)) / num_steps / 1e6,
        **{f"{name}_s": seconds for name, seconds in mean_s.items()},
    )


def _on_cpu(
    whole: Sequence[Mapping[str, Any]], thread: object, parts: Mapping[str, Intervals], steps: Intervals
) -> tuple[dict[str, Intervals], Intervals]:
    """Assign the main thread's time to the parts of the steps, and find the communication that it does not
    wait for.

    Args:
        whole: the complete events of the trace.
        thread: the main thread, in which the trainer's ranges are.
        parts: the trainer's ranges by part.
        steps: the steps.

    Returns:
        (the intervals of each part, those of hidden communication), in microseconds.
    """
    transfers = [_interval(e) for e in whole if e["name"].startswith("gloo:")]
    working = union(_interval(e) for e in whole if e.get("cat") == "cpu_op" and e["tid"] == thread)
    computed = union(moment for name in _COMPUTED for moment in parts.get(name, []))
    # Between two operators of a part the thread waits for a transfer if one is under way; otherwise the time
    # is Python's. Nothing waits for the transfer of the consensus message, which lasts for the whole forward
    # pass.
    waited_for = union(_without_agreement(transfers, parts.get("agreement", [])))
    waiting = union([*parts.get("waiting", []), *intersect(subtract(waited_for, working), computed)])
    spent = {name: subtract(parts.get(name, []), waiting) for name in ("data", *_COMPUTED)}
    return spent | {"communication": waiting}, subtract(union(transfers), waiting)


def _without_agreement(transfers: Sequence[Interval], agreements: Intervals) -> Intervals:
    """Return the transfers without those of the consensus message. That is the first transfer to begin after
    each agreement, when no other one is under way."""
    rest = sorted(transfers)
    for begun, _ in agreements:
        first = next((transfer for transfer in rest if transfer[0] >= begun), None)
        if first is not None:
            rest.remove(first)
    return rest


def _on_gpu(
    on_gpu: Sequence[Mapping[str, Any]],
    whole: Sequence[Mapping[str, Any]],
    parts: Mapping[str, Intervals],
    steps: Intervals,
) -> tuple[dict[str, Intervals], Intervals]:
    """Assign the GPU's time to the parts of the steps: a kernel belongs to the part in which the host
    launched it. Idle time counts as 'data' or communication if the host was in that part.

    Args:
        on_gpu: the events of the GPU.
        whole: the complete events of the trace.
        parts: the trainer's ranges by part, on the host.
        steps: the steps.

    Returns:
        (the intervals of each part, the hidden communication), in microseconds.
    """
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in whole
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    # The parts do not overlap, so that the last range that began before a launch is the only one it can be
    # in.
    ranges = sorted((*interval, name) for name, intervals in parts.items() for interval in intervals)

    def find_part(moment: float | None) -> str:
        """Return the part in which the host was at a moment; 'other' outside of all parts, and for None."""
        if moment is None:
            return "other"
        index = bisect_right(ranges, moment, key=itemgetter(0)) - 1
        return ranges[index][2] if index >= 0 and moment <= ranges[index][1] else "other"

    kernels: dict[str, Intervals] = {}
    for event in on_gpu:
        launched = launched_at.get(event.get("args", {}).get("correlation"))
        name = "nccl" if "nccl" in event["name"].lower() else find_part(launched)
        kernels.setdefault(name, []).append(_interval(event))
    transfers = union(kernels.pop("nccl", []))
    spent: dict[str, Intervals] = {}
    busy: Intervals = []
    for part in (*_COMPUTED, "data"):
        # Kernels of several streams may overlap: a moment counts for the first of these parts.
        spent[part] = subtract(union(kernels.pop(part, [])), busy)
        busy = union([*busy, *spent[part]])
    busy = union([*busy, *(moment for rest in kernels.values() for moment in rest)])
    exposed = subtract(transfers, busy)
    idle = subtract(steps, union([*busy, *transfers]))
    return {
        **{part: spent[part] for part in _COMPUTED},
        "data": union([*spent["data"], *intersect(idle, parts.get("data", []))]),
        "communication": union([*exposed, *intersect(idle, parts.get("waiting", []))]),
    }, intersect(transfers, busy)


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the union of intervals, which may overlap and come in any order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return the moments that are in both."""
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return the moments of `left` that are not in `right`."""
    if not left:
        return []
    # The complement of `right`, within the range of `left`.
    edges = [left[0][0], *(edge for interval in right for edge in interval), left[-1][1]]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return intersect(left, gaps)


def total(intervals: Intervals) -> float:
    """Return the total length of the intervals."""
    return sum(end - start for start, end in intervals)
