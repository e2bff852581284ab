"""Where the time of a run's steps went, as real ranks record it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import nbgpu

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
EXCHANGE = {"exchange_s", "hidden_s", "exposed_s", "waiting_s", "transfer_s"}
COMPUTED = ["forward_s", "backward_s", "optimizer_s"]
PARTS = ["data_s", *COMPUTED, "exposed_s", "other_s"]
SLOW_RANK_1 = """
import time
from nbgpu.recipes.autoencoder.recipe import Autoencoder
_loss = Autoencoder.loss
def slow(self, model, batch):
    time.sleep(0.25 * rank)
    return _loss(self, model, batch)
Autoencoder.loss = slow
"""


@pytest.fixture(scope="module")
def run(cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in which the second rank computes a quarter of a second longer than the first."""
    cluster2.execute(SLOW_RANK_1)
    try:
        folder = str(tmp_path_factory.mktemp("parts"))
        return cluster2.train("autoencoder", **SMALL, accumulate=2, runs_dir=folder).wait(120)
    finally:
        cluster2.execute("Autoencoder.loss = _loss")


def test_the_parts_add_up_to_the_step(run: Any) -> None:
    found = run.step_parts()
    assert list(zip(found["step"], found["rank"], strict=True)) == [
        (s, r) for s in range(1, 9) for r in (0, 1)
    ]
    assert found[PARTS].sum(axis=1).to_numpy() == pytest.approx(found["step_s"].to_numpy(), rel=0.02)
    assert (found[COMPUTED] > 0).all(axis=None)
    assert (found["exchange_s"] - found["hidden_s"] - found["exposed_s"]).abs().max() < 1e-6


def test_the_other_rank_waits_for_the_slow_one(run: Any) -> None:
    found = run.step_parts()
    # On a busy machine the other rank may be the last one in a single step.
    assert (found["waited_for"] == 1).mean() > 0.5
    fast, slow = found[found["rank"] == 0], found[found["rank"] == 1]
    # Two micro-batches, in each of which rank 1 sleeps.
    assert fast["waiting_s"].median() > 0.3
    assert slow["waiting_s"].median() == 0
    assert slow["forward_s"].median() - fast["forward_s"].median() > 0.3
    assert fast["transfer_s"].median() < fast["waiting_s"].median()


def test_moments_stand_in_the_records_alone(run: Any) -> None:
    recorded = run.metrics().dropna(subset=["loss"])
    moments = {"begun_at_s", "ready_at_s"}
    assert moments <= set(recorded.columns)
    assert (recorded["ready_at_s"] > recorded["begun_at_s"]).all()
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    assert not moments & set(table.columns)
    by_step = recorded.sort_values(["step", "rank"])
    for name in ("forward_s", "backward_s", "optimizer_s", "exchange_s", "hidden_s", "exposed_s"):
        assert list(table[name]) == list(by_step[name])


@pytest.mark.parametrize("changed", [{"strategy": "fsdp"}, {"telemetry": False}])
def test_what_cannot_be_told_is_left_out(
    cluster2: nbgpu.Cluster, tmp_path: Path, changed: dict[str, Any]
) -> None:
    run = cluster2.train("autoencoder", **SMALL | {"steps": 2} | changed, runs_dir=str(tmp_path)).wait(120)
    found = run.step_parts()
    assert not EXCHANGE & set(found.columns)
    if "strategy" in changed:
        assert len(found) == 4
        assert (found[COMPUTED] > 0).all(axis=None)
    else:
        assert found.empty


def test_a_discriminator_is_exchanged_too(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = SMALL | {"steps": 4, "adversarial_weight": 0.1, "adversarial_after": 2}
    found = cluster2.train("autoencoder", **settings, runs_dir=str(tmp_path)).wait(120).step_parts()
    assert len(found) == 8
    assert found[PARTS].sum(axis=1).to_numpy() == pytest.approx(found["step_s"].to_numpy(), rel=0.02)
    assert (found["exchange_s"] - found["hidden_s"] - found["exposed_s"]).abs().max() < 1e-6
