"""What real runs are said to be bound by, where that is known because it was made so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nbgpu

RECIPE = """
import time

import torch
import torch.distributed as dist
from torch import nn

from nbgpu.recipes.own import OwnRecipe


class Samples(torch.utils.data.Dataset):
    def __init__(self, read_s):
        self.read_s = read_s

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.read_s)
        return torch.full((4,), float(index)), torch.ones(1)


class Made(OwnRecipe):
    # What bounds it is made with these.
    read_s: float = 0.0  # time to read a sample
    compute_s: float = 0.1  # time of a forward pass
    late_s: float = 0.0  # by how much rank 1 is slower
    validate_s: float = 0.0  # time of a validation
    batch_size: int = 2
    num_workers: int = 0

    def dataset(self):
        return Samples(self.read_s)

    def model(self):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        x, y = batch
        if torch.is_grad_enabled():
            time.sleep(self.compute_s + (self.late_s if dist.get_rank() == 1 else 0.0))
        else:
            time.sleep(self.validate_s)
        return (model(x / 64) - y).square().mean()
"""
STEPS = {"steps": 14, "work_out_result": False}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "made.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"val_every": 0}, "computation"),
        ({"val_every": 0, "read_s": 0.1}, "data"),
        ({"val_every": 0, "late_s": 0.15}, "imbalance"),
        ({"val_every": 1, "validate_s": 0.2, "val_fraction": 0.1}, "validation"),
    ],
)
def test_the_known_bottleneck_is_named(
    cluster2: Any, recipe: str, tmp_path: Path, settings: dict[str, Any], bound: str
) -> None:
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **STEPS, **settings).wait()
    told = run.explain()
    assert told.bound == bound, str(told)
    parts = run.step_parts()
    columns = [name for name in parts if name.endswith("_s") and name not in ("step_s", "hidden_s")]
    assert (parts[columns].sum(axis=1) / parts["step_s"]).between(0.98, 1.02).all()
    # Other work on the machine may come in, but most of a step lies in parts that have a name.
    assert (parts["other_s"] / parts["step_s"]).median() < 0.2
    if bound == "imbalance":
        assert "rank 0 waits" in told.sentences[0]
        assert (parts["waited_for"] == 1).mean() > 0.8


def test_a_validation_that_is_made_rarer_brings_what_was_promised(
    cluster2: Any, recipe: str, tmp_path: Path
) -> None:
    made = {"val_every": 1, "validate_s": 0.2, "val_fraction": 0.1, "runs_dir": str(tmp_path), **STEPS}
    (advice,) = cluster2.train(recipe, **made).wait().explain().advice
    rarer = cluster2.train(recipe, **made | advice.settings).wait().explain()
    # Within the run there may be none at all.
    assert rarer.step_s <= 1.2 * advice.step_s


def test_too_few_steps_are_not_explained(cluster2: Any, recipe: str, tmp_path: Path) -> None:
    run = cluster2.train(recipe, runs_dir=str(tmp_path), steps=3, val_every=0, work_out_result=False).wait()
    with pytest.raises(nbgpu.RunError, match="3 steps with their parts were recorded"):
        run.explain()
