"""What a panel remembers, and how it goes over the wire."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import RecordedRun

from nbgpu.protocol.records import Event, Sample
from nbgpu.ui.run.comm_protocol import SeriesIds, encode
from nbgpu.ui.run.history import CAPACITY, History, Series, keep_extremes
from nbgpu.ui.run.panel import Panel


def sample(rank: int, step: int, **values: float) -> Sample:
    return Sample(rank=rank, seq=step, time_s=1000.0 + step, step=step, values=values)


def event(kind: str, text: str, step: int, rank: int = 0) -> Event:
    return Event(rank=rank, seq=0, time_s=1000.0, step=step, kind=kind, text=text)


@pytest.mark.parametrize("num_columns", [1, 2, 50, 250])
def test_thinning_keeps_the_extremes_of_every_column_and_both_ends(num_columns: int) -> None:
    x = np.cumsum(np.random.default_rng(0).random(10_000))
    values = np.sin(np.arange(10_000) / 50)
    values[4321], values[8765] = 100, -100
    kept = keep_extremes(x, values, num_columns)
    assert len(kept) <= 2 * num_columns + 2
    assert {0, 4321, 8765, 9999} <= set(kept)
    assert (np.diff(kept) > 0).all()
    columns = np.minimum((x - x[0]) // ((x[-1] - x[0]) / num_columns), num_columns - 1)
    for column in range(num_columns):
        own, left = values[columns == column], values[kept][columns[kept] == column]
        assert (left.min(), left.max()) == (own.min(), own.max())


def test_nan_hides_no_extreme() -> None:
    values = np.ones(1000)
    values[[0, 500]] = math.nan
    values[501] = 50
    assert 501 in keep_extremes(np.arange(1000.0), values, 1)


def test_the_beginning_of_a_long_run_is_as_fine_as_its_end() -> None:
    series = Series()
    for step in range(30 * CAPACITY):
        series.append(1000.0 + step, step, math.sin(step))
    assert sum(step < 3 * CAPACITY for step in series.steps) > 100


def test_a_pause_in_which_no_step_passes_keeps_its_points() -> None:
    series = Series()
    for second in range(2 * CAPACITY):
        series.append(1000.0 + second, min(second, CAPACITY), float(second % 7))
    thin = series.thinned(500)
    assert len(thin.values) <= 500
    assert sum(time_s > 1000 + CAPACITY for time_s in thin.times_s) > 100


def test_steps_that_are_done_again_replace_what_they_were() -> None:
    series = Series()
    for step, value in [(9, 1.0), (10, 2.0), (11, 3.0), (12, 4.0), (11, 5.0), (12, 6.0)]:
        series.append(100.0 + step, step, value)
    assert (series.steps, series.values) == ([9, 10, 11, 12], [1.0, 2.0, 5.0, 6.0])


def test_a_long_run_stays_in_bounded_memory() -> None:
    history = History()
    history.add(sample(0, step, loss=-9.0 if step == 777 else 1.0) for step in range(5 * CAPACITY))
    series = history.series[0, "loss"]
    assert len(series.values) < CAPACITY
    assert min(series.values) == -9
    assert series.steps[-1] == 5 * CAPACITY - 1


def test_a_number_that_is_alike_on_all_ranks_is_kept_once() -> None:
    history = History()
    history.add([sample(0, 1, lr=0.1, loss=1.0), sample(1, 1, lr=0.1, loss=2.0)])
    assert set(history.series) == {(0, "lr"), (0, "loss"), (1, "loss")}


def test_what_all_ranks_tell_is_marked_once_and_a_mere_change_of_state_not_at_all() -> None:
    history = History()
    _, marks = history.add(
        [
            event("state", "training", 0),
            event("state", "paused", 5, rank=0),
            event("state", "paused", 5, rank=1),
            event("checkpoint", "step-5", 5),
            event("result", "held out", 5),
        ]
    )
    assert [(m.kind, m.text) for m in marks] == [("state", "paused"), ("checkpoint", "step-5")]
    assert history.result is not None


def test_the_wire_carries_flat_little_endian_arrays() -> None:
    ids = SeriesIds()
    series = {
        (0, "loss"): Series([1000.25, 1000.5], [1, 2], [0.5, 0.25]),
        (1, "loss"): Series([1000.25], [1], [2.0]),
    }
    numbers, times_s, steps, values = encode(series, ids, max_points=500)
    assert np.frombuffer(numbers, "<u2").tolist() == [0, 0, 1]
    assert np.frombuffer(times_s, "<f8").tolist() == [1000.25, 1000.5, 1000.25]
    assert np.frombuffer(steps, "<i4").tolist() == [1, 2, 1]
    assert np.frombuffer(values, "<f4").tolist() == [0.5, 0.25, 2.0]
    assert ids.announce() == [[0, "loss"], [1, "loss"]]
    encode({(0, "lr"): series[1, "loss"]}, ids, max_points=500)
    assert ids.announce(first=2) == [[0, "lr"]]


def test_a_past_that_comes_after_the_page_was_ready_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after attach: the run has a long past, and the page is sooner ready than that is read."""
    run = RecordedRun(tmp_path, steps=1500, step_s=1e-4)
    run.wait(400)
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    panel = Panel(run, "slot")  # type: ignore[arg-type]
    monkeypatch.setattr(panel, "send", lambda content, buffers=(): sent.append((content, list(buffers))))
    panel._on_page_message(panel, {"type": "ready", "plotly": True}, [])
    panel._follower.read(last=False)
    panel.close()
    snapshot, delta = (message for message in sent if message[0]["type"] in ("snapshot", "delta"))
    assert snapshot[0]["series"] == []
    names = delta[0]["series"]
    numbers, _, steps, values = (
        np.frombuffer(data, kind) for data, kind in zip(delta[1], ("<u2", "<f8", "<i4", "<f4"), strict=True)
    )
    for rank in (0, 1):
        mine = numbers == names.index([rank, "loss"])
        assert steps[mine].tolist() == list(range(1, 1501))
        recorded = panel._follower.history.series[rank, "loss"].values
        assert values[mine].tolist() == np.asarray(recorded, dtype=np.float32).tolist()


def test_a_rank_whose_host_is_waited_for_is_said_to_be_lost(tmp_path: Path) -> None:
    """And what it said last, and the pace of both until then, is not said to be so now."""
    run = RecordedRun(tmp_path, steps=500, step_s=0.002)
    panel = Panel(run, "slot")  # type: ignore[arg-type]
    give_up_s = time.monotonic() + 300
    while not ((before := panel._status())["samples_per_s"] and before["ranks"][1]["memory_bytes"]):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    run.lost_ranks = [1]
    status = panel._status()
    run.wait(400)
    assert before["ranks"][1]["memory_bytes"]
    assert status["ranks"][0]["state"] != "lost"
    assert status["ranks"][1] == {
        "state": "lost",
        "step": None,
        "memory_bytes": None,
        "warning": "its host is lost",
    }
    assert (status["samples_per_s"], status["eta"]) == (0, "")


def test_a_moment_of_a_long_run_costs_a_few_points(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, steps=3000, step_s=1e-4)
    run.wait(400)
    panel = Panel(run, "slot")  # type: ignore[arg-type]
    panel._follower.read(last=False)
    whole = panel._follower.history.series[0, "loss"]
    moment = Series(whole.times_s[-3:], whole.steps[-3:], whole.values[-3:])
    assert panel._num_points({(0, "loss"): moment}) < 200
    assert panel._num_points({(0, "loss"): whole}) == panel._num_points_of_whole() >= 3000
    panel.close()
