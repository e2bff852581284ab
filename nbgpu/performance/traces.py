"""Chrome traces of all ranks: from the ranks' records, and from the files of torch's profiler.

The format is described in 'Trace Event Format' (Google, 2016). Times are in microseconds, from the first
moment of the trace.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nbgpu.errors import RunError
from nbgpu.performance.rank_steps import Span
from nbgpu.performance.timeline_figure import WORDS, Steps

_MAIN, _DATA, _EXCHANGE = 1, 2, 3
"""Threads of a rank; transfers that are on their way at once have threads of their own, from the last number
on."""
_PIDS_OF_RANK = 1000
"""The process numbers of a rank's trace begin at its rank times this one, plus one."""
_STEP_PART = "nbgpu.data"
"""The first part of a step, in the profiler's trace: the moment from which the records count, too."""
_FLOWS = frozenset("stf")
_FLOW_IDS = 2**40


@dataclass(frozen=True)
class Profile:
    """What torch's profiler wrote on one rank."""

    path: Path
    first_step: int


def write(
    path: Path,
    title: str,
    steps: Steps,
    begun_s: Mapping[int, Sequence[float]],
    about: Sequence[str],
    profiles: Mapping[int, Profile],
    ranks: Sequence[int],
    unit: str = "step",
) -> Path:
    """Write one trace of all ranks; compressed if the name of the file ends in '.gz'.

    Args:
        path: the file.
        title: the run or cell.
        steps: by step all spans and the critical path, by the clock of rank 0.
        begun_s: by step the moments at which the ranks began it, by the clock of rank 0.
        about: about the ranks' clocks, and what else is to be known.
        profiles: what the profiler wrote, by rank; empty for none.
        ranks: their numbers.
        unit: 'step', or 'cell'.

    Raises:
        RunError: a file of the profiler cannot be read.
    """
    zero_s = min(span.begin_s for spans, _ in steps.values() for span in spans)
    events = list(_record_events(title, steps, ranks, zero_s, unit))
    errors_us = {}
    for rank, profile in sorted(profiles.items()):
        of_rank, errors_us[f"rank {rank}"] = _profiler_events(
            profile, rank, {step: 1e6 * (begun[rank] - zero_s) for step, begun in begun_s.items()}
        )
        events += of_rank
    other: dict[str, Any] = {"title": title, "clocks": about[0], "notes": about[1:], f"{unit}s": list(steps)}
    if errors_us:
        other["profiler_clock_error_us"] = errors_us
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    text = json.dumps(trace)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def _record_events(
    title: str, steps: Steps, ranks: Sequence[int], zero_s: float, unit: str
) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        pid = rank * _PIDS_OF_RANK + 1
        of_rank = [(step, s) for step, (spans, _) in steps.items() for s in spans if s.rank == rank]
        threads = _threads([span for _, span in of_rank])
        names = {_MAIN: "computation", _DATA: "data"}
        names |= {tid: f"exchange {tid - _EXCHANGE + 1}" for tid in threads.values() if tid >= _EXCHANGE}
        yield from _named(pid, f"rank {rank}", rank + 1, names)
        for step, span in of_rank:
            yield _event(span, step, pid, threads[span], zero_s, unit)
    yield from _path_events(title, steps, (max(ranks) + 1) * _PIDS_OF_RANK + 1, zero_s, unit)


def _path_events(title: str, steps: Steps, pid: int, zero_s: float, unit: str) -> Iterator[dict[str, Any]]:
    """The critical paths, with the title, because viewers show no `otherData`."""
    yield from _named(pid, f"critical path, {title}", 0, {1: "critical path"})
    for step, (_, path) in steps.items():
        for span in path:
            event = _event(span, step, pid, 1, zero_s, unit)
            yield {**event, "name": f"rank {span.rank}: {event['name']}"}


def _event(span: Span, step: int, pid: int, tid: int, zero_s: float, unit: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {unit: step, "rank": span.rank}
    if span.name:
        arguments["operation"] = span.name
    if span.num_bytes:
        arguments["bytes"] = span.num_bytes
    return {
        "ph": "X",
        "name": WORDS[span.kind],
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": round(1e6 * (span.begin_s - zero_s), 3),
        "dur": round(1e6 * (span.end_s - span.begin_s), 3),
        "args": arguments,
    }


def _named(pid: int, name: str, place: int, threads: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}
    for tid, thread in sorted(threads.items()):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _threads(spans: Sequence[Span]) -> dict[Span, int]:
    """A thread for each span of a rank: in one thread no two overlap."""
    threads = {}
    ends_s: list[float] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        if span.kind not in ("exchange", "collective"):
            threads[span] = _DATA if span.kind == "data" else _MAIN
            continue
        free = next((i for i, end_s in enumerate(ends_s) if end_s <= span.begin_s), len(ends_s))
        ends_s[free : free + 1] = [span.end_s]
        threads[span] = _EXCHANGE + free
    return threads


def _profiler_events(
    profile: Profile, rank: int, begun_us: Mapping[int, float]
) -> tuple[list[dict[str, Any]], float]:
    """The events of a rank's profile on the time axis of the records, and the error in microseconds.

    The profiler has a clock of its own. The beginnings of the steps are known by both clocks: the median of
    the differences is taken off, and the largest distance from it is the error.
    """
    try:
        with gzip.open(profile.path, "rt") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        begins_us = sorted(
            event["ts"]
            for event in events
            if event.get("name") == _STEP_PART and event.get("cat") == "user_annotation"
        )
        differences = [us - begins_us[step - profile.first_step] for step, us in begun_us.items()]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{profile.path} is not a trace of these steps by torch's profiler: {error!r}. "
            "Take chrome_trace(path, profiled=False)"
        ) from None
    shift_us = median(differences)
    error_us = max(abs(difference - shift_us) for difference in differences)
    pids: dict[object, int] = {}
    moved = []
    for event in events:
        if "pid" not in event:
            continue
        pid = pids.setdefault(event["pid"], rank * _PIDS_OF_RANK + 2 + len(pids))
        new = {**event, "pid": pid}
        if "ts" in event and event.get("ph") != "M":
            new["ts"] = round(event["ts"] + shift_us, 3)
        if event.get("ph") in _FLOWS and isinstance(event.get("id"), int):
            new["id"] = event["id"] + rank * _FLOW_IDS
        if event.get("ph") == "M" and event.get("name") == "process_name":
            new["args"] = {"name": f"rank {rank}, profiler: {event['args']['name']}"}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            new["args"] = {"sort_index": 1000 * (rank + 1) + pid % _PIDS_OF_RANK}
        moved.append(new)
    return moved, error_us
