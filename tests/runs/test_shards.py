"""What ranks hold that share a model out (`strategy="fsdp"`), and how they use it beside training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
from safetensors.torch import load_file

import nbgpu
from nbgpu.run_folder import checkpoint_files

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbgpu.recipes.own import OwnRecipe


class Layers(OwnRecipe):
    width: int = 16
    num_layers: int = 3
    num_held_out: int = 5
    bad_sample: int = -1
    strategy: str = "fsdp"
    batch_size: int = 1

    def dataset(self):
        return TensorDataset(torch.randn(8, self.width))

    def val_dataset(self):
        numbers = torch.arange(self.num_held_out, dtype=torch.float32)
        return TensorDataset(numbers[:, None].expand(-1, self.width) / 10)

    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.num_layers)))

    def loss(self, model, batch):
        return model(batch).square().mean()

    def metrics(self, model, batch):
        number = round(float(batch[0, 0]) * 10)
        if number == self.bad_sample:
            raise ValueError(f"sample {number} is bad")
        # As many forward passes as the sample's number, and one that is left half-way.
        for _ in range(number):
            out = model(batch)
        for layer in list(model)[: number % 3]:
            batch = layer(batch)
        return {"last": out.mean() if number else torch.zeros(())}

    def result(self, model, device):
        with torch.no_grad():
            return {"ones": float(model(torch.ones(1, self.width, device=device)).sum())}
"""


LIMIT_BYTES = 2**30


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbgpu.Cluster]:
    with nbgpu.Cluster(**launching.settings(), memory_limit=LIMIT_BYTES) as cluster:
        yield cluster


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "layers.py"
    path.write_text(RECIPE)
    return str(path)


def validations(run: Any) -> list[float]:
    table = run.metrics()
    values: list[float] = (
        table.dropna(subset=["val_last"])[["val_loss", "val_last"]].to_numpy().ravel().tolist()
    )
    return values


def test_ranks_with_different_forward_passes_validate_as_one_does(
    cluster: nbgpu.Cluster, recipe: str, tmp_path: Path
) -> None:
    """Rank 0 has three held-out samples and rank 1 has two; each takes another number of forward passes."""
    settings: dict[str, Any] = {"steps": 2, "val_every": 1, "ema_decay": 0.9, "runs_dir": str(tmp_path)}
    shared_out = cluster.train(recipe, **settings).wait(400)
    replicated = cluster.train(recipe, **settings, strategy="ddp").wait(400)
    assert len(validations(shared_out)) == 4
    assert validations(shared_out) == pytest.approx(validations(replicated), rel=1e-5)
    assert shared_out.result()["ones"] == pytest.approx(replicated.result()["ones"], rel=1e-5)
    for name in (checkpoint_files.MODEL, checkpoint_files.AVERAGE):
        found, expected = (load_file(run.checkpoint() / name) for run in (shared_out, replicated))
        assert set(found) == set(expected)
        for weight, tensor in expected.items():
            torch.testing.assert_close(found[weight], tensor)


@pytest.mark.parametrize("bad_sample", [1, 4])
def test_a_sample_that_fails_on_one_rank_holds_no_other_up(
    cluster: nbgpu.Cluster, recipe: str, tmp_path: Path, bad_sample: int
) -> None:
    """Sample 1 is the first of rank 1, while rank 0 still has passes to do, and 4 the last of rank 0."""
    settings: dict[str, Any] = {"steps": 2, "val_every": 1, "runs_dir": str(tmp_path)}
    run = cluster.train(recipe, **settings, bad_sample=bad_sample)
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(400)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.error_type) == (bad_sample % 2, "ValueError")
    assert f"sample {bad_sample} is bad" in failure.message
    assert cluster.train(recipe, **settings).wait(400).status == "finished"


@pytest.mark.long
def test_a_state_of_60_percent_of_the_limit_trains_validates_is_saved_and_resumed(
    cluster: nbgpu.Cluster, recipe: str, tmp_path: Path
) -> None:
    """Weights and both moments; with the gradients a rank has half of four times the weights."""
    width, num_layers = 1280, 33
    model_bytes = 4 * width**2 * num_layers
    assert 3 * model_bytes > 0.6 * LIMIT_BYTES
    settings: dict[str, Any] = {
        "width": width,
        "num_layers": num_layers,
        "num_held_out": 3,
        "lr": 1e-3,
        "warmup_steps": 0,
        "val_every": 1,
        "checkpoint_every": 2,
        "schedule": "constant",
        "keep_checkpoints": 1,
        "runs_dir": str(tmp_path / "runs"),
    }
    first = cluster.train(recipe, **settings, steps=1).wait(400)
    assert first.status == "finished"
    assert (first.checkpoint() / checkpoint_files.MODEL).stat().st_size > model_bytes
    notes = first.notes()
    assert not [note for note in notes if "could not be written" in note], notes
    resumed = cluster.train(recipe, **settings, steps=2, resume=str(first.folder)).wait(400)
    assert resumed.status == "finished"
    straight = cluster.train(recipe, **settings, steps=2).wait(400)
    losses = [run.metrics().dropna(subset=["loss"]) for run in (resumed, straight)]
    last = [table[table["step"] > 1].sort_values(["step", "rank"])["loss"].tolist() for table in losses]
    assert last[0] == last[1]
    assert len(last[0]) == 2
    assert resumed.result() == straight.result()


def test_shards_on_gpus_over_gloo_are_refused(cluster: nbgpu.Cluster) -> None:
    """torch would end with SIGSEGV when it gathers them; it takes no GPU to hear of it."""
    code = (
        "from nbgpu.config import train_config\nfrom nbgpu.engine.model.strategy import spread\n"
        "config = train_config('autoencoder', strategy='fsdp')\n"
        "spread(config, torch.nn.Linear(2, 2), [], torch.device('cuda'))"
    )
    with pytest.raises(nbgpu.RankError, match="strategy='fsdp' on several GPU ranks needs NCCL") as caught:
        cluster.execute(code)
    assert {failure.error_type for failure in caught.value.failures} == {"ConfigError"}
