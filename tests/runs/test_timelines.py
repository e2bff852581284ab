"""A timeline of all ranks over some steps of real runs: its figure, its traces, and the ranks' clocks."""

from __future__ import annotations

import gzip
import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nbgpu
from nbgpu.client.runs.run import Run

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "channels": (16, 32, 64),
    "steps": 8,
    "val_every": 0,
    "threads": 1,
    "bucket_mb": 0.2,
}
SLOW_RANK_1 = """
import time
from nbgpu.recipes.autoencoder.recipe import Autoencoder
_loss = Autoencoder.loss
def slow(self, model, batch):
    time.sleep(0.6 * rank)
    return _loss(self, model, batch)
Autoencoder.loss = slow
"""


@pytest.fixture(scope="module")
def run(cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in which the second rank computes half a second longer, with two profiled steps."""
    cluster2.execute(SLOW_RANK_1)
    try:
        folder = str(tmp_path_factory.mktemp("timeline"))
        return cluster2.train("autoencoder", **SMALL, profile="7:8", runs_dir=folder).wait(400)
    finally:
        cluster2.execute("Autoencoder.loss = _loss")


def test_the_critical_path_is_on_the_slow_rank_until_the_transfer(run: Run) -> None:
    found = run.timeline(range(3, 6))
    assert found.steps == [3, 4, 5]
    for step in found.steps:
        path = found.critical_path(step)
        assert {s.rank for s in path if s.kind == "forward"} == {1}
        assert {s.rank for s in path if s.kind == "backward"} == {1}
        assert all(before.end_s <= after.begin_s + 1e-9 for before, after in pairwise(path))
        covered_s = sum(s.end_s - s.begin_s for s in path)
        assert covered_s == pytest.approx(path[-1].end_s - path[0].begin_s, rel=0.02)
        waited_s = {s.rank: s.end_s - s.begin_s for s in found.spans(step) if s.kind == "waiting"}
        assert set(waited_s) == {0}
        assert waited_s[0] > 0.2
    for before, after in pairwise(found.critical_path(step) for step in found.steps):
        assert before[-1].rank == after[0].rank
        assert before[-1].end_s <= after[0].begin_s + 1e-9
    assert "one machine: offset 0" in str(found)


def test_the_buckets_are_those_of_the_model(cluster2: nbgpu.Cluster, run: Run) -> None:
    found = run.timeline([5])
    for rank in (0, 1):
        sent = [s for s in found.spans(5) if s.kind == "exchange" and s.rank == rank]
        assert len(sent) > 1
        assert sum(s.num_bytes for s in sent) == cluster2.plan("autoencoder", **SMALL).memory["gradients"]


def test_the_timeline_agrees_with_the_parts_of_the_records(run: Run) -> None:
    parts = run.step_parts().set_index(["step", "rank"])
    found = run.timeline([4])
    for rank in (0, 1):
        for kind in ("forward", "waiting"):
            drawn_s = sum(s.end_s - s.begin_s for s in found.spans(4) if (s.rank, s.kind) == (rank, kind))
            assert drawn_s == pytest.approx(parts.loc[(4, rank), f"{kind}_s"], abs=1e-6)


def test_the_newest_steps_with_every_moment_are_shown_by_default(run: Run) -> None:
    assert run.timeline().steps == [7, 8]


def test_a_step_without_its_moments_is_drawn_from_its_parts(run: Run) -> None:
    found = run.timeline(6)
    assert not [s for s in found.spans(6) if s.kind == "exchange"]
    assert {s.rank for s in found.critical_path(6) if s.kind == "forward"} == {1}
    assert run.timeline([6, 5]).steps == [5, 6]


@pytest.mark.parametrize(
    ("steps", "message"), [(99, r"steps \[99\] were not .* 3 to 5, 7 to 8"), (range(1, 90), "too many")]
)
def test_steps_that_were_not_recorded_are_refused(run: Run, steps: Any, message: str) -> None:
    with pytest.raises(nbgpu.ConfigError, match=message):
        run.timeline(steps)


def test_the_figure_has_lanes_for_each_rank_and_the_path(run: Run) -> None:
    found = run.timeline(range(3, 6))
    bundle = found._repr_mimebundle_()
    drawn = bundle["application/vnd.plotly.v1+json"]
    json.dumps(drawn, allow_nan=False)
    names = {trace["name"] for trace in drawn["data"]}
    assert {
        "forward",
        "backward",
        "waiting for the last rank",
        "gradients on their way",
        "critical path",
    } <= names
    lanes = drawn["layout"]["yaxis"]
    assert lanes["ticktext"] == [
        f"rank {r}, computation" if n == 0 else name
        for r in (0, 1)
        for n, name in enumerate(("computation", "exchange", "data"))
    ]
    assert all(y in lanes["tickvals"] for trace in drawn["data"][:-1] for y in trace["y"])
    assert "measured" in drawn["layout"]["title"]["text"]
    assert bundle["text/plain"] == str(found)
    # Plotly itself accepts every property.
    assert len(found.figure().data) == len(drawn["data"])


def events_of(path: Path) -> list[dict[str, Any]]:
    written = path.read_bytes()
    text = gzip.decompress(written) if path.suffix == ".gz" else written
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def require_a_trace(events: list[dict[str, Any]]) -> None:
    """The rules of the format that a viewer needs: times, numbers, and names of processes and threads."""
    for event in events:
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] > -1e6
            assert event["dur"] >= 0
            assert event["name"]


def names_of(events: list[dict[str, Any]], what: str) -> dict[Any, str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == what}


def test_the_chrome_trace_has_all_ranks_and_no_thread_overlaps(run: Run, tmp_path: Path) -> None:
    path = run.timeline(range(3, 6)).chrome_trace(tmp_path / "trace.json")
    events = events_of(path)
    require_a_trace(events)
    assert set(names_of(events, "process_name").values()) == {
        "critical path, autoencoder on 2 ranks",
        "rank 0",
        "rank 1",
    }
    threads = names_of(events, "thread_name")
    assert {"computation", "data", "exchange 1", "critical path"} <= set(threads.values())
    by_thread: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads
            by_thread.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in by_thread.values():
        # Microseconds are rounded to nanoseconds.
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(sorted(spans)))
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0


def test_the_profiles_of_all_ranks_are_merged_on_one_time_axis(run: Run, tmp_path: Path) -> None:
    events = events_of(run.timeline().chrome_trace(tmp_path / "trace.json.gz"))
    require_a_trace(events)
    drawn = {e["args"]["rank"]: [] for e in events if e.get("cat") == "forward"}  # type: ignore[var-annotated]
    assert set(drawn) == {0, 1}
    for rank in (0, 1):
        pids = {
            pid
            for (pid, _), name in names_of(events, "process_name").items()
            if name.startswith(f"rank {rank},")
        }
        assert pids
        of_profiler = sorted(e["ts"] for e in events if e["name"] == "nbgpu.forward" and e["pid"] in pids)
        of_records = sorted(
            e["ts"] for e in events if e.get("cat") == "forward" and e["pid"] == 1000 * rank + 1
        )
        assert len(of_records) == 2
        # Both say when the forward pass began, within what a busy machine puts between the two readings.
        assert of_profiler == pytest.approx(of_records, abs=100_000)
        assert any(e["name"].startswith("gloo:") for e in events if e["pid"] in pids)
    alone = events_of(run.timeline().chrome_trace(tmp_path / "alone.json", profiled=False))
    assert not [e for e in alone if e["name"].startswith("nbgpu.")]


@pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="HolisticTraceAnalysis is not installed")
def test_holistic_trace_analysis_opens_the_traces(run: Run, tmp_path: Path) -> None:
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    merged = run.timeline().chrome_trace(tmp_path / "trace.json")
    assert len(TraceAnalysis(trace_files={0: str(merged)}).t.get_trace(0)) > 100
    assert sorted(TraceAnalysis(trace_dir=str(run.folder / "profile")).t.get_ranks()) == [0, 1]


def test_a_damaged_profile_is_named(run: Run, tmp_path: Path) -> None:
    path = run.folder / "profile" / "rank1.trace.json.gz"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:1000])
        with pytest.raises(nbgpu.RunError, match=r"rank1\.trace\.json\.gz is not a trace.*profiled=False"):
            run.timeline().chrome_trace(tmp_path / "trace.json")
    finally:
        path.write_bytes(whole)


def test_the_offset_of_two_clocks_is_found(cluster2: nbgpu.Cluster) -> None:
    printed = cluster2.execute(
        "import json, time\n"
        "from types import SimpleNamespace\n"
        "from nbgpu.engine.group import exchange\n"
        "same = exchange.clock_offsets()\n"
        "exchange.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 5 * rank)\n"
        "apart = exchange.clock_offsets()\n"
        "exchange.time = time\n"
        "print(json.dumps([same, apart]))"
    )
    for text in printed.values():
        same, apart = json.loads(text)
        for found, offset_s in ((same, 0.0), (apart, -5.0)):
            assert found[0] == [0.0, 0.0]
            estimated_s, error_s = found[1]
            assert abs(estimated_s - offset_s) <= error_s
            assert 0 < error_s < 1


def test_ranks_on_several_hosts_compare_their_clocks(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute(
        "from nbgpu.engine.training import loop; _id = loop.clock_id; loop.clock_id = lambda: str(rank)"
    )
    try:
        run = cluster2.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    finally:
        cluster2.execute("loop.clock_id = _id")
    compared = [event for event in run.reader.events() if event.kind == "clocks"]
    assert [event.rank for event in compared] == [0, 0]
    for event in compared:
        assert abs(event.detail["offsets_s"][1]) <= event.detail["errors_s"][1]
    assert "clocks of several machines" in str(run.timeline())
    assert run.step_parts()["waiting_s"].notna().all()
