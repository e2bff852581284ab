"""Recipes in files of one's own, trained on real ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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
from nbgpu.telemetry import Reader

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
    # What was learned can be had anywhere.
    x = torch.linspace(-3, 3, 50)[:, None]
    with torch.no_grad():
        error = torch.nn.functional.mse_loss(load_trained(run.folder)(x), torch.sin(2 * x))
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


WRONG_SHAPE = COUNTING.replace("nn.Linear(3, 1)", "helper.network()")
HELPER = """
import torch
from torch import nn

BAD = -1


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)  # samples have 3 numbers

    def forward(self, x):
        return self.layer(x)


def network():
    return Network()
"""


@pytest.fixture
def wrong_shape(counting: str) -> Path:
    """A recipe whose network, in a file beside it, takes other shapes than its samples have."""
    folder = Path(counting).parent
    (folder / "helper.py").write_text(HELPER)
    (folder / "wrong_shape.py").write_text(WRONG_SHAPE)
    return folder / "wrong_shape.py"


def shown(error: nbgpu.RankError) -> str:
    """What a notebook shows of it, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error._render_traceback_()))


def test_torchs_own_errors_are_shown_with_the_persons_lines(
    cluster2: nbgpu.Cluster, wrong_shape: Path, tmp_path: Path
) -> None:
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train(str(wrong_shape), steps=5, val_every=0, runs_dir=str(tmp_path / "runs")).wait(120)
    told = shown(caught.value)
    line = next(n for n, text in enumerate(WRONG_SHAPE.splitlines(), start=1) if "self.scale" in text)
    # The person's files, and not the copy in the run's folder.
    assert f"File {wrong_shape}:{line}, in Counting.loss" in told
    assert re.search(rf"-+> {line} +return .*self.scale \* model", told)
    assert f"File {wrong_shape.parent / 'helper.py'}:14, in Network.forward" in told
    assert re.search(r"-+> 14 +return self.layer\(x\)", told)
    assert told.count("File ") == 2
    assert "nbgpu_runs" not in told
    assert re.search(r"\(\d+ frames of libraries left out\)\n\nRuntimeError: mat1 and mat2", told)
    # Attached to, or read from its folder, the run says the same.
    (run_folder,) = (tmp_path / "runs").iterdir()
    left = json.loads((run_folder / "rank0.outcome.json").read_text())["failure"]["traceback"]
    assert f'File "{wrong_shape}", line {line}, in loss' in left
    assert left.count("File ") == 2
    events = Reader(run_folder, 2, live=False).events()
    assert {event.text.partition(":")[0] for event in events if event.kind == "failure"} == {"RuntimeError"}


def test_a_rank_that_was_cut_off_is_no_failure_beside_the_cause(
    cluster2: nbgpu.Cluster, counting: str, tmp_path: Path
) -> None:
    failing = 'if torch.distributed.get_rank() == 1:\n            raise OSError("no more tape")\n        return {"loss"'
    Path(counting).write_text(COUNTING.replace('return {"loss"', failing))
    run = cluster2.train(counting, steps=5, val_every=0, runs_dir=str(tmp_path / "runs"))
    with pytest.raises(nbgpu.RankError, match="rank 1: OSError: no more tape"):
        run.wait(120)
    told = [(event.rank, event.text) for event in run.reader.events() if event.kind == "failure"]
    assert told == [(1, "OSError: no more tape")]
    assert {status.state for status in run.statuses()} == {"failed"}


def test_the_line_that_was_run_is_shown_also_where_the_file_was_edited_since(
    cluster2: nbgpu.Cluster, counting: str, tmp_path: Path
) -> None:
    late = 'if batch["x"].sum() < 1e9 and self.config.steps == 4 and _edited():\n            raise OSError("late")\n        return {"loss"'
    edits = 'def _edited():\n    from pathlib import Path\n    Path(__file__).write_text("# edited")\n    return True\n\n\nclass Counting'
    text = COUNTING.replace('return {"loss"', late).replace("class Counting", edits)
    Path(counting).write_text(text)
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train(counting, steps=4, val_every=0, runs_dir=str(tmp_path / "runs")).wait(120)
    assert Path(counting).read_text() == "# edited"
    assert re.search(r'-+> \d+ +raise OSError\("late"\)', shown(caught.value))


def test_a_worker_process_names_the_persons_line_too(
    cluster2: nbgpu.Cluster, counting: str, tmp_path: Path
) -> None:
    (Path(counting).parent / "helper.py").write_text("BAD = 7\n")
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train(counting, steps=30, val_every=0, num_workers=1, runs_dir=str(tmp_path / "runs")).wait(
            240
        )
    told = shown(caught.value)
    assert f'File "{counting}", line 19, in __getitem__\n    raise ValueError("cannot be read")' in told
    assert "ValueError: cannot be read\nin sample 7 of the dataset" in told
    assert told.count("File ") == 1


def test_the_command_line_shows_the_persons_lines(wrong_shape: Path, tmp_path: Path) -> None:
    wrong_import = tmp_path / "wrong_import.py"
    wrong_import.write_text(f"import torch_vision\n{COUNTING}")
    flags = ["--gpus", "none", "--ranks", "2", "--steps", "5", "--val-every", "0", "--threads", "1"]
    done = {
        recipe: subprocess.run(
            [
                sys.executable,
                "-m",
                "nbgpu.cli",
                "train",
                str(recipe),
                *flags,
                "--runs-dir",
                str(tmp_path / "runs"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        for recipe in (wrong_shape, wrong_import)
    }
    assert {one.returncode for one in done.values()} == {1}
    assert f"File {wrong_import}:1\n----> 1 import torch_vision\n" in done[wrong_import].stderr
    told = done[wrong_shape]
    assert "self.scale * model" in told.stderr
    assert f"File {wrong_shape.parent / 'helper.py'}:14, in Network.forward" in told.stderr
    assert "\x1b" not in told.stderr
    happened = [line for line in told.stdout.splitlines() if line.startswith("step 0: ")]
    assert happened[0].startswith("step 0: failure: RuntimeError: mat1 and mat2")
    assert "cut off" not in told.stdout + told.stderr


def test_under_torchrun_too(wrong_shape: Path, tmp_path: Path) -> None:
    settings = (
        f'[train]\nrecipe = "{wrong_shape}"\nsteps = 2\nval_every = 0\nruns_dir = "{tmp_path / "runs"}"\n'
    )
    (tmp_path / "run.toml").write_text(f'{settings}\n[cluster]\ngpus = "none"\n')
    done = subprocess.run(
        [sys.executable, "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert f'File "{wrong_shape}", line ' in done.stderr
    assert "self.scale * model" in done.stderr
    assert "RuntimeError: mat1 and mat2" in done.stderr.splitlines()[-1]
