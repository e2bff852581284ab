"""Settings that are changed while a run goes on reach all ranks at the same step, and are written down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.protocol.records import Event

STEPS_PER_EPOCH = 4
ENDLESS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    # 16 for training, 8 on each rank, so that an epoch has 4 steps.
    "num_phantoms": 20,
    "batch_size": 2,
    "steps": 100_000,
    "val_every": 0,
    "threads": 1,
}


@pytest.fixture
def run(cluster2: nbgpu.Cluster, tmp_path: Path) -> Iterator[Run]:
    started = cluster2.train("autoencoder", runs_dir=str(tmp_path), **ENDLESS)
    try:
        wait_until(lambda: min(s.step for s in started.statuses()) >= 2, started)
        yield started
    finally:
        if not started.over:
            started.stop()
            started.wait(400)


def wait_until(condition: Callable[[], bool], run: Run) -> None:
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, f"{run} {run.failures}"
        time.sleep(0.05)


def changes(run: Run) -> list[Event]:
    records, _ = run.reader.since()
    return [r for r in records if isinstance(r, Event) and r.kind == "setting"]


def go_on(run: Run, num_steps: int) -> None:
    """Waits until every rank has done so many steps more."""
    target = max(s.step for s in run.statuses()) + num_steps
    wait_until(lambda: min(s.step for s in run.statuses()) >= target, run)


@pytest.mark.long
def test_what_belongs_to_a_step_lands_at_the_same_step_on_all_ranks(run: Run) -> None:
    run.set(lr=0.5, clip_norm=1e-6, amp="bf16")
    wait_until(lambda: len(changes(run)) == 1, run)
    go_on(run, 3)
    run.stop()
    run.wait(400)
    (change,) = changes(run)
    assert change.text == "lr 0.004 → 0.5, clip_norm 1.0 → 1e-06, amp off → bf16"
    assert change.detail == {"lr": 0.5, "clip_norm": 1e-6, "amp": "bf16"}
    frame = run.metrics().dropna(subset=["lr"])
    for rank in (0, 1):
        steps = frame[frame["rank"] == rank].set_index("step")["lr"]
        warmup_share = change.step / 5000
        assert steps[change.step] <= 0.004
        assert steps[change.step + 1] == pytest.approx(0.5 * (warmup_share + 1 / 5000))
    assert run.config.lr == 0.5
    (line,) = (run.folder / "changes.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"step": change.step, "set": change.detail}.items()
    saved = json.loads((run.checkpoint() / "state.json").read_text())["config"]
    assert (saved["lr"], saved["amp"]) == (0.5, "bf16")


@pytest.mark.long
def test_what_belongs_to_the_data_lands_between_two_epochs(run: Run) -> None:
    run.set(batch_size=4, cache_rate=0.5)
    wait_until(lambda: len(changes(run)) == 1, run)
    go_on(run, 3)
    (change,) = changes(run)
    assert change.step % STEPS_PER_EPOCH == 0
    assert (run.info.batch_size, run.info.global_batch_size, run.info.steps_per_epoch) == (4, 8, 2)
    # A second change counts its epochs from the first one.
    run.set(batch_size=1)
    wait_until(lambda: len(changes(run)) == 2, run)
    go_on(run, 3)
    assert (changes(run)[1].step - change.step) % 2 == 0
    assert run.info.global_batch_size == 2


@pytest.mark.long
def test_the_steps_between_two_records_can_be_changed(run: Run) -> None:
    run.set(log_every=5)
    wait_until(lambda: len(changes(run)) == 1, run)
    go_on(run, 11)
    (change,) = changes(run)
    frame = run.metrics().dropna(subset=["loss"])
    later = set(frame[frame["step"] > change.step + 1]["step"])
    assert later
    assert all(step % 5 == 0 for step in later)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"channels": (8, 8), "lr": 0.1},
            "channels cannot be changed while a run goes on. What can be: .*lr",
        ),
        ({"lr": -1, "clip_norm": -2}, r"lr = -1 is not valid[\s\S]*clip_norm = -2 is not valid"),
    ],
)
def test_a_bad_one_changes_nothing(run: Run, settings: dict[str, Any], said: str) -> None:
    before = run.config
    with pytest.raises(nbgpu.ConfigError, match=said):
        run.set(**settings)
    assert run.config == before
    assert not (run.folder / "commands.jsonl").exists()


@pytest.mark.long
def test_a_run_that_is_over_says_so(run: Run) -> None:
    run.stop()
    run.wait(400)
    with pytest.raises(nbgpu.RunError, match="is stopped: it cannot be changed any more"):
        run.set(lr=0.1)
