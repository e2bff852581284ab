"""Recipes in files of one's own, trained on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nbgpu
from nbgpu import recipe_files
from nbgpu.config import OwnConfig, train_config
from nbgpu.recipes.own import Own
from nbgpu.recipes.trained import load_trained

COUNTING = '''
import random

import helper
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from nbgpu.recipes.own import OwnRecipe


class Numbers(Dataset):
    def __len__(self):
        return 21

    def __getitem__(self, index):
        if index == helper.BAD:
            raise ValueError("cannot be read")
        drawn = torch.rand(()) + np.random.rand() + random.random()
        return {"x": torch.full((3,), float(index)), "drawn": drawn, "label": index % 2}


class Counting(OwnRecipe):
    """Counts."""

    scale: float = 1.0
    val_fraction: float = 0.0

    def dataset(self):
        return Numbers()

    def model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        return {"loss": (self.scale * model(batch["x"]) - batch["drawn"]).square().mean(), "seen": batch["x"].sum()}

    def metrics(self, model, batch):
        return {"odd": batch["label"].float().mean()}
'''


@pytest.fixture
def counting(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("BAD = -1\n")
    (tmp_path / "counting.py").write_text(COUNTING)
    return str(tmp_path / "counting.py")


def recipe_of(path: str, **settings: Any) -> Own:
    config = train_config(path, **settings)
    assert isinstance(config, OwnConfig)
    return Own(config)


def epochs_of(recipe: Own, rank: int, world_size: int, count: int = 1) -> list[list[dict[str, torch.Tensor]]]:
    loaders = recipe.build_loaders(rank, world_size)
    try:
        return [[dict(batch) for batch in loaders.train] for _ in range(count)]
    finally:
        loaders.close()


def numbers(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(value) for batch in batches for value in batch["x"][:, 0]]


def test_every_sample_comes_once_an_epoch_over_all_ranks(counting: str) -> None:
    padded = recipe_of(counting, batch_size=2)
    ranks = [epochs_of(padded, rank, 2, count=2) for rank in range(2)]
    for epoch in range(2):
        seen = [number for rank in ranks for number in numbers(rank[epoch])]
        # 21 samples in steps of 4: the last step is filled from the beginning.
        assert len(seen) == 24
        assert set(seen) == set(range(21))
    assert numbers(ranks[0][0]) != numbers(ranks[0][1])
    uneven = recipe_of(counting, batch_size=2, shards="uneven")
    seen = [number for rank in range(2) for number in numbers(epochs_of(uneven, rank, 2)[0])]
    assert len(seen) == len(set(seen)) == 20


def test_a_step_has_the_same_samples_however_many_ranks_share_it(counting: str) -> None:
    (alone,) = epochs_of(recipe_of(counting, batch_size=4), 0, 1)
    shares = [epochs_of(recipe_of(counting, batch_size=2), rank, 2)[0] for rank in range(2)]
    for step, batch in enumerate(alone):
        together = {name: torch.cat([share[step][name] for share in shares]) for name in batch}
        for name, values in batch.items():
            assert torch.equal(values, together[name])


def test_training_goes_on_in_the_middle_with_the_same_random_samples(counting: str) -> None:
    first, second = epochs_of(recipe_of(counting, batch_size=2), 0, 2, count=2)
    loaders = recipe_of(counting, batch_size=2).build_loaders(0, 2)
    loaders.seek(len(first) + 2)
    np.random.seed(5)
    for expected, batch in zip(second[2:], loaders.train, strict=True):
        assert torch.equal(expected["drawn"], batch["drawn"])
    assert not torch.equal(first[0]["drawn"], second[0]["drawn"])


def test_worker_processes_change_nothing(cluster2: nbgpu.Cluster, counting: str, tmp_path: Path) -> None:
    settings = {"steps": 8, "val_every": 0, "runs_dir": str(tmp_path / "runs")}
    losses = [
        cluster2.train(counting, num_workers=count, **settings)
        .wait(120)
        .metrics()
        .sort_values(["step", "rank"])["loss"]
        .dropna()
        .tolist()
        for count in (0, 1)
    ]
    assert len(losses[0]) == 16
    assert losses[0] == losses[1]


def test_a_new_recipe_learns_as_it_is(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    path = recipe_files.create(str(tmp_path / "my_sine"))
    plan = cluster2.plan(str(path), hidden=16)
    assert plan.memory["parameters"] == 4 * (16 + 16 + 16 * 16 + 16 + 16 + 1)
    run = cluster2.train(str(path), hidden=16, steps=150, val_every=75, runs_dir=str(tmp_path / "runs")).wait(
        120
    )
    assert run.status == "finished"
    assert run.info.recipe == "my_sine"
    assert "-my_sine-" in run.folder.name
    assert plan.data == run.info.data
    metrics = run.metrics()
    losses = metrics["val_loss"].dropna()
    # The mean of sin^2 is 0.5; a straight line gets no lower than 0.43.
    assert losses.iloc[-1] < 0.2
    # What was learned can be had anywhere, by whoever trusts the file that makes the model.
    with pytest.raises(nbgpu.ConfigError, match=r"my_sine\.py.* trust=True"):
        load_trained(run.folder)
    x = torch.linspace(-3, 3, 50)[:, None]
    with torch.no_grad():
        error = torch.nn.functional.mse_loss(load_trained(run.folder, trust=True)(x), torch.sin(2 * x))
    assert error == pytest.approx(float(losses.iloc[-1]), rel=0.5)
    # The run can be had again from its folder, whatever becomes of the file.
    assert (run.folder / "my_sine.py").read_text() == path.read_text()
    again = cluster2.train(
        str(path), hidden=16, steps=160, val_every=0, runs_dir=str(tmp_path / "runs"), resume="auto"
    ).wait(120)
    assert json.loads((again.checkpoint() / "state.json").read_text())["step"] == 160


def test_what_fails_in_the_recipe_is_told_with_its_line_and_the_ranks_live_on(
    cluster2: nbgpu.Cluster, counting: str
) -> None:
    folder = Path(counting).parent
    settings = {"steps": 30, "val_every": 0, "runs_dir": str(folder / "runs")}
    (folder / "helper.py").write_text("BAD = 7\n")
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train(counting, **settings).wait(120)
    (failure,) = [f for f in caught.value.failures if f.error_type == "ValueError"]
    assert "cannot be read" in failure.message
    assert "in sample 7 of the dataset" in failure.traceback
    assert "counting.py" in failure.traceback
    # The edited file counts the next time.
    (folder / "helper.py").write_text("BAD = -1\n")
    text = COUNTING.replace('batch["x"]) - batch', 'batch["y"]) - batch')
    Path(counting).write_text(text)
    with pytest.raises(nbgpu.RankError, match="KeyError"):
        cluster2.train(counting, **settings).wait(120)
    Path(counting).write_text(COUNTING)
    run = cluster2.train(counting, **{**settings, "val_every": 15, "val_fraction": 0.3}).wait(120)
    assert set(run.metrics().columns) >= {"loss", "seen", "val_loss", "val_odd"}
