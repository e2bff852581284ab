"""A result that takes long: the ranks share the work out, and say how far they have come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nbgpu
from nbgpu.config import train_config
from nbgpu.engine.workload.recipe import Evaluated
from nbgpu.recipes.diffusion.recipe import Diffusion
from nbgpu.recipes.survival.recipe import Survival
from nbgpu.recipes.trained import load_trained

SETTINGS: dict[str, dict[str, Any]] = {
    "survival": {"num_patients": 40, "batch_size": 4, "widen_factor": 0.0625},
    "diffusion": {"num_phantoms": 20, "size": 8, "val_fraction": 0.35, "batch_size": 2},
}
RECIPES: dict[str, Any] = {"survival": Survival, "diffusion": Diffusion}
NUM_SAMPLES = {"survival": 40, "diffusion": 7}
"""All patients, because the baselines are fitted to those who were trained on; the held-out cases."""


@pytest.mark.parametrize("recipe", SETTINGS)
def test_the_ranks_share_the_samples_of_a_result_and_it_is_that_of_one(
    cluster2: nbgpu.Cluster, tmp_path: Path, recipe: str
) -> None:
    settings = {**SETTINGS[recipe], "steps": 2, "val_every": 0, "threads": 1}
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **settings).wait(400)
    told = [(e.rank, e.detail["done"], e.detail["total"]) for e in run.reader.events() if "total" in e.detail]
    totals = {rank: total for rank, _, total in told}
    num_samples = NUM_SAMPLES[recipe]
    assert sorted(totals.items()) == [(0, num_samples - num_samples // 2), (1, num_samples // 2)]
    assert {rank: max(done for r, done, _ in told if r == rank) for rank in totals} == totals

    alone = RECIPES[recipe](train_config(recipe, **settings))
    assert isinstance(alone, Evaluated)
    result = run.result()
    assert result is not None
    expected = alone.result(load_trained(run.folder), torch.device("cpu"))
    assert result["table"].keys() == expected["table"].keys()
    for name, row in expected["table"].items():
        assert result["table"][name] == pytest.approx(row, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("recipe", SETTINGS)
def test_without_held_out_samples_there_is_nothing_to_share(
    cluster2: nbgpu.Cluster, tmp_path: Path, recipe: str
) -> None:
    settings = {**SETTINGS[recipe], "steps": 1, "val_every": 0, "val_fraction": 0.0, "threads": 1}
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **settings).wait(400)
    result = run.result()
    assert result is not None
    assert result["table"] == {}
