"""A timeline of all ranks over some steps of a run, or over a cell, and its Chrome trace.

The format of traces is described in 'Trace Event Format' (Google, 2016). Their times are in microseconds,
from the first moment of the trace.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Literal

from nbgpu.errors import ConfigError, RunError
from nbgpu.performance import rank_steps, timeline_figure
from nbgpu.performance.clocks import Clocks
from nbgpu.performance.rank_steps import RankStep, Span
from nbgpu.performance.timeline_figure import WORDS
from nbgpu.protocol.records import TIMELINE, Event, Sample
from nbgpu.text.ranks import consecutive
from nbgpu.text.tables import aligned

_MAX_STEPS = 50
"""A browser takes long to draw a figure of more steps."""
_INCOMPARABLE = "the critical path begins after the last wait that cannot be compared between the ranks"

_MAIN, _DATA, _EXCHANGE = 1, 2, 3
"""The thread ids of a rank in the trace. Transfers that overlap get one thread each: _EXCHANGE, _EXCHANGE + 1
and so on."""
_PIDS_PER_RANK = 1000
"""The process ids of rank n in the trace begin at n times this number, plus one."""
_STEP_PART = "nbgpu.data"
"""The profiler's annotation of the first part of a step. Its beginning is also that of the step's record."""
_FLOWS = frozenset("stf")
"""The phases of flow events in the trace format: start, step and finish."""
_FLOW_IDS_PER_RANK = 2**40


class Timeline:
    """What every rank did in some steps, or in a cell. It shows as a figure in a notebook, and prints as a
    table.

    Args:
        title: the run or cell, with the simulated link and slow ranks if there are any.
        steps: by step number, the step of every rank in order of rank. A cell is one step with the number of
            the cell.
        clocks: how the ranks' clocks were brought together.
        profiles: what the profiler wrote, by rank, if it ran in these steps.
        unit: whether the numbers are those of steps or of cells.
        notes: remarks to print below the table and in the figure's title.
    """

    def __init__(
        self,
        title: str,
        steps: Mapping[int, Sequence[RankStep]],
        clocks: Clocks,
        profiles: Mapping[int, Profile] | None = None,
        unit: Literal["step", "cell"] = "step",
        notes: Sequence[str] = (),
    ) -> None:
        """Keep the steps in order of their numbers."""
        self.title = title
        self.by_step = dict(sorted(steps.items()))
        self.clocks = clocks
        self.unit = unit
        self.notes = list(notes)
        self._profiles = dict(profiles or {})

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, or of the cell."""
        return list(self.by_step)

    @property
    def world_size(self) -> int:
        return len(next(iter(self.by_step.values())))

    @property
    def ranks(self) -> list[int]:
        """The numbers of the ranks."""
        return [rank.rank for rank in next(iter(self.by_step.values()))]

    def spans(self, step: int) -> list[Span]:
        """Return the spans of all ranks in a step or cell: data, computation, waiting, and transfers."""
        ranks = self.by_step[step]
        return [
            *(span for rank in ranks for span in rank.work),
            *rank_steps.blocked_spans(ranks),
            *(span for rank in ranks for span in rank.sent),
        ]

    def critical_path(self, step: int) -> list[Span]:
        """Return the chain of spans that determined the time of a step, from its beginning to its end. Where
        a rank waited for another one, the chain continues on the rank that was waited for.

        The path of a step ends on the rank on which the path of the next step begins, if this timeline has
        the next step, and otherwise on the rank that finished last. In a cell the path begins after the last
        collective that some ranks waited in and others did not.
        """
        return self._paths[step]

    @cached_property
    def _paths(self) -> dict[int, list[Span]]:
        """The critical path of each step. Steps are visited from the last one back, because the path of a
        step ends on the rank on which that of the next step begins."""
        paths: dict[int, list[Span]] = {}
        for step, ranks in reversed(self.by_step.items()):
            # A transfer stands for the rank that received, which need not be the one on which a path begins.
            next_path = paths.get(step + 1, [])
            ends_on = next_path[0].rank if next_path and next_path[0].kind != "transfer" else None
            path = rank_steps.critical_path(ranks, ends_on)
            # A wait that cannot be compared between the ranks hides which rank held the others up, so the
            # path begins after the last such wait.
            begin = max((index + 1 for index, span in enumerate(path) if span.kind == "blocked"), default=0)
            paths[step] = path[begin:]
        return paths

    def figure(self) -> Any:
        """Return a `plotly.graph_objects.Figure` that can be zoomed: for each rank a lane for its
        computation, for the exchange of gradients and for the data, and the critical path of each step as a
        line."""
        from plotly.graph_objects import Figure

        figure = self._plotly_json()
        return Figure(data=figure["data"], layout=figure["layout"])

    def chrome_trace(self, path: str | Path, profiled: bool = True) -> Path:
        """Write one trace of all ranks, which ui.perfetto.dev and chrome://tracing open.

        Args:
            path: the file; compressed if its name ends in '.gz'.
            profiled: whether to add the operators and kernels that the profiler saw, if it ran in these
                steps. The trace then has all steps of the profiler.

        Returns:
            The path.

        Raises:
            RunError: a file of the profiler cannot be read.
        """
        path, (clocks, *notes) = Path(path), self._remarks()
        events, errors_us = list(self._record_events()), {}
        for rank, profile in sorted(self._profiles.items()) if profiled else ():
            index = self.ranks.index(rank)
            begun_us = {step: self._us(ranks[index].begin_s) for step, ranks in self.by_step.items()}
            rank_events, errors_us[f"rank {rank}"] = _profiler_events(profile, rank, begun_us)
            events += rank_events
        metadata: dict[str, Any] = {"title": self.title, "clocks": clocks, "notes": notes}
        metadata[f"{self.unit}s"] = self.steps
        if errors_us:
            metadata["profiler_clock_error_us"] = errors_us
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata})
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    def _record_events(self) -> Iterator[dict[str, Any]]:
        """Yield the trace events of all ranks: a process for each rank with threads for computation, data and
        transfers, and one process for the critical path."""
        for rank in self.ranks:
            pid = rank * _PIDS_PER_RANK + 1
            spans = [(step, s) for step in self.steps for s in self.spans(step) if s.rank == rank]
            threads = _threads([span for _, span in spans])
            names = {_MAIN: "computation", _DATA: "data"}
            names |= {tid: f"exchange {tid - _EXCHANGE + 1}" for tid in threads.values() if tid >= _EXCHANGE}
            yield from _process_metadata(pid, f"rank {rank}", rank + 1, names)
            for step, span in spans:
                yield self._event(span, step, pid, threads[span])
        # The process's name has the title, because viewers do not show `otherData`.
        pid = (max(self.ranks) + 1) * _PIDS_PER_RANK + 1
        yield from _process_metadata(pid, f"critical path, {self.title}", 0, {1: "critical path"})
        for step in self.steps:
            for span in self.critical_path(step):
                event = self._event(span, step, pid, 1)
                yield {**event, "name": f"rank {span.rank}: {event['name']}"}

    def _event(self, span: Span, step: int, pid: int, tid: int) -> dict[str, Any]:
        """Return a complete event ('X') of the trace format for a span."""
        arguments: dict[str, Any] = {self.unit: step, "rank": span.rank}
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
            "ts": round(self._us(span.begin_s), 3),
            "dur": round(1e6 * (span.end_s - span.begin_s), 3),
            "args": arguments,
        }

    def _us(self, at_s: float) -> float:
        """Return a moment in microseconds since the first span of the timeline."""
        return 1e6 * (at_s - self._begin_s)

    @cached_property
    def _begin_s(self) -> float:
        return min(span.begin_s for step in self.steps for span in self.spans(step))

    def _plotly_json(self) -> dict[str, Any]:
        """Return the figure of the type `application/vnd.plotly.v1+json`."""
        steps = {step: (self.spans(step), self.critical_path(step)) for step in self.by_step}
        return timeline_figure.figure(self.title, self.ranks, steps, self._remarks(), self.unit)

    def _remarks(self) -> list[str]:
        """Return sentences: on the clocks first, then the notes, and whether the path lacks a beginning."""
        has_blocked = any(span.kind == "blocked" for step in self.by_step for span in self.spans(step))
        return [self.clocks.in_words(), *self.notes, *([_INCOMPARABLE] if has_blocked else [])]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.plotly.v1+json": self._plotly_json(), "text/plain": str(self)}

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__

    def _in_lines(self) -> Iterator[str]:
        """Yield the lines of the printed table: the time of each step, the rank it ended on, and its critical
        path."""
        yield self.title
        rows: list[tuple[str, ...]] = [(self.unit, "ms", "ended on", "critical path")]
        for step, ranks in self.by_step.items():
            seconds = max(rank.end_s for rank in ranks) - min(rank.begin_s for rank in ranks)
            last = max(ranks, key=lambda rank: rank.end_s).rank
            rows.append((str(step), f"{1e3 * seconds:.2f}", f"rank {last}", self._format_path(step)))
        yield from aligned(rows, right=(0, 1))
        yield from self._remarks()

    def _format_path(self, step: int) -> str:
        """Return the critical path of a step as text with times in ms, such as 'rank 1: data 0.10, forward
        10.20; rank 0: transfer 2.10'."""
        path = self.critical_path(step)
        if self.unit == "cell":
            # In a cell with a loop the path alternates between ranks in every iteration, so totals for each
            # rank are shown.
            path = sorted(path, key=lambda span: span.rank)
        parts = []
        for rank, spans in groupby(path, key=lambda span: span.rank):
            seconds: dict[str, float] = defaultdict(float)
            for span in spans:
                seconds[span.kind] += span.end_s - span.begin_s
            parts.append(f"rank {rank}: " + ", ".join(f"{kind} {1e3 * s:.2f}" for kind, s in seconds.items()))
        return "; ".join(parts)


def of_run(
    title: str,
    world_size: int,
    events: Iterable[Event],
    records: Callable[[], Iterable[Sample | Event]],
    profiles: Mapping[int, Path],
    steps: int | Iterable[int] | None = None,
) -> Timeline:
    """Build the timeline of some steps of a run.

    Args:
        title: the run, with the simulated link and slow ranks if there are any.
        world_size: the number of ranks.
        events: of all ranks, those of a rank in the order in which it recorded them.
        records: returns all records. It is called only for steps without a TIMELINE event.
        profiles: the profiler's files by rank, those that exist.
        steps: the numbers of steps; None for the newest steps with a TIMELINE event.

    Raises:
        ConfigError: a step was not recorded by all ranks, or there are too many steps.
    """
    events = list(events)
    clocks = Clocks.of(events, world_size)
    by_step: dict[int, dict[int, RankStep]] = {}
    profiled: dict[int, Profile] = {}
    profiled_steps: set[int] = set()
    for event in events:
        if event.kind == TIMELINE:
            shift_s = _shift_s(clocks, event.rank, event.detail)
            rank_step = rank_steps.from_moments(event.step, event.rank, event.detail, shift_s)
            if rank_step is not None:
                by_step.setdefault(event.step, {})[event.rank] = rank_step
        elif event.kind == "profile" and event.rank in profiles:
            first, last = event.detail["steps"]
            profiled[event.rank] = Profile(profiles[event.rank], first)
            profiled_steps = set(range(first, last + 1))
    detailed = {step: by_rank for step, by_rank in by_step.items() if _are_together(by_rank, world_size)}
    wanted = _wanted(steps, detailed)
    if missing := set(wanted) - detailed.keys():
        for record in records():
            if isinstance(record, Sample) and record.step in missing:
                begun_s = record.values.get("begun_at_s", 0.0)
                shift_s = clocks.of_rank_0(record.rank, begun_s) - begun_s
                rank_step = rank_steps.from_parts(record.step, record.rank, record.values, shift_s)
                if rank_step is not None:
                    by_step.setdefault(record.step, {})[record.rank] = rank_step
    lacking = [step for step in wanted if not _are_together(by_step.get(step, {}), world_size)]
    if not wanted:
        raise ConfigError(
            "no step was recorded moment by moment: the run has fewer than 3 steps, was started with telemetry=False, "
            "or trains no model"
        )
    if lacking:
        available = f". Every moment was recorded of the steps {_ranges(detailed)}" if detailed else ""
        raise ConfigError(f"steps {lacking} were not recorded by all ranks{available}")
    return Timeline(
        title,
        {step: [by_rank for _, by_rank in sorted(by_step[step].items())] for step in wanted},
        clocks,
        profiled if profiled_steps >= set(wanted) else {},
    )


def _shift_s(clocks: Clocks, rank: int, detail: Mapping[str, Any]) -> float:
    """Return the seconds to add to the moments of a rank's event to convert them to rank 0's clock; 0 for a
    damaged event, for which `from_moments` returns None."""
    try:
        begun_s = float(detail["marks"][0][1])
    except (LookupError, TypeError, ValueError):
        return 0.0
    return clocks.of_rank_0(rank, begun_s) - begun_s


def _are_together(by_rank: Mapping[int, RankStep], world_size: int) -> bool:
    """Return whether all ranks recorded a step, and in the same attempt: after a failure some ranks may have
    repeated a step that others have only recorded before it."""
    if len(by_rank) < world_size:
        return False
    return max(r.begin_s for r in by_rank.values()) <= min(r.end_s for r in by_rank.values())


def _wanted(steps: int | Iterable[int] | None, detailed: Iterable[int]) -> list[int]:
    """Return the numbers of the steps to show: those asked for, or the newest uninterrupted series of steps
    that were recorded moment by moment."""
    if steps is None:
        groups = consecutive(sorted(detailed))
        return groups[-1][-_MAX_STEPS:] if groups else []
    wanted = [steps] if isinstance(steps, int) else sorted(set(steps))
    if len(wanted) > _MAX_STEPS:
        raise ConfigError(f"{len(wanted)} steps are too many for one timeline: at most {_MAX_STEPS}")
    return wanted


def _ranges(steps: Iterable[int]) -> str:
    """Return steps as text, such as '3 to 5, 10 to 12'."""
    groups = consecutive(sorted(steps))
    return ", ".join(f"{g[0]} to {g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


@dataclass(frozen=True)
class Profile:
    """What torch's profiler wrote on one rank."""

    path: Path
    first_step: int


def _process_metadata(
    pid: int, name: str, sort_index: int, threads: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that name a process and its threads and set their order in the viewer."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": sort_index}}
    for tid, thread in sorted(threads.items()):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _threads(spans: Sequence[Span]) -> dict[Span, int]:
    """Assign a thread to each span of a rank, so that no two spans of one thread overlap."""
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
    """Return the events of a rank's profile on the time axis of the records, and the error of their times in
    microseconds.

    The profiler's times are of another clock than the records'. Both have the beginnings of the steps: the
    profiler's times are shifted by the median difference, and the largest deviation from it is the error.

    Args:
        profile: the file, and the number of its first step.
        rank: the rank.
        begun_us: the beginning of each step on the time axis of the trace.
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
        pid = pids.setdefault(event["pid"], rank * _PIDS_PER_RANK + 2 + len(pids))
        new = {**event, "pid": pid}
        phase, name = event.get("ph"), event.get("name")
        if "ts" in event and phase != "M":
            new["ts"] = round(event["ts"] + shift_us, 3)
        # Ids of flows and of processes must differ between the ranks of one trace.
        if phase in _FLOWS and isinstance(event.get("id"), int):
            new["id"] = event["id"] + rank * _FLOW_IDS_PER_RANK
        if phase == "M" and name == "process_name":
            new["args"] = {"name": f"rank {rank}, profiler: {event['args']['name']}"}
        if phase == "M" and name == "process_sort_index":
            new["args"] = {"sort_index": 1000 * (rank + 1) + pid % _PIDS_PER_RANK}
        moved.append(new)
    return moved, error_us
