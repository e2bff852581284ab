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
from rows import row

import nbgpu
from nbgpu.config import OwnConfig, own_file, train_config
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.dry_run.steps import without_exchange
from nbgpu.protocol.records import Sample
from nbgpu.recipes.own import Own
from nbgpu.recipes.trained import load_trained
from nbgpu.run_folder.reader import Reader

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


@pytest.mark.long
def test_worker_processes_change_nothing(cluster2: nbgpu.Cluster, counting: str, tmp_path: Path) -> None:
    settings = {"steps": 8, "val_every": 0, "runs_dir": str(tmp_path / "runs")}
    losses = [
        cluster2.train(counting, num_workers=count, **settings)
        .wait(400)
        .metrics()
        .sort_values(["step", "rank"])["loss"]
        .dropna()
        .tolist()
        for count in (0, 1)
    ]
    assert len(losses[0]) == 16
    assert losses[0] == losses[1]


def test_a_new_recipe_learns_as_it_is(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    path = own_file.create(str(tmp_path / "my_sine"))
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
    ).wait(400)
    assert json.loads((again.checkpoint() / "state.json").read_text())["step"] == 160


def test_what_fails_in_the_recipe_is_told_with_its_line_and_the_ranks_live_on(
    cluster2: nbgpu.Cluster, counting: str
) -> None:
    folder = Path(counting).parent
    settings = {"steps": 30, "val_every": 0, "runs_dir": str(folder / "runs")}
    (folder / "helper.py").write_text("BAD = 7\n")
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train(counting, **settings).wait(400)
    (failure,) = [f for f in caught.value.failures if f.error_type == "ValueError"]
    assert "cannot be read" in failure.message
    assert "in sample 7 of the dataset" in failure.traceback
    assert "counting.py" in failure.traceback
    # The edited file counts the next time.
    (folder / "helper.py").write_text("BAD = -1\n")
    text = COUNTING.replace('batch["x"]) - batch', 'batch["y"]) - batch')
    Path(counting).write_text(text)
    with pytest.raises(nbgpu.RankError, match="KeyError"):
        cluster2.train(counting, **settings).wait(400)
    Path(counting).write_text(COUNTING)
    run = cluster2.train(counting, **{**settings, "val_every": 15, "val_fraction": 0.3}).wait(400)
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
        cluster2.train(str(wrong_shape), steps=5, val_every=0, runs_dir=str(tmp_path / "runs")).wait(400)
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
        run.wait(400)
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
        cluster2.train(counting, steps=4, val_every=0, runs_dir=str(tmp_path / "runs")).wait(400)
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


@pytest.mark.long
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
            timeout=600,
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


@pytest.mark.long
def test_under_torchrun_too(wrong_shape: Path, tmp_path: Path) -> None:
    settings = (
        f'[train]\nrecipe = "{wrong_shape}"\nsteps = 2\nval_every = 0\nruns_dir = "{tmp_path / "runs"}"\n'
    )
    (tmp_path / "run.toml").write_text(f'{settings}\n[cluster]\ngpus = "none"\n')
    done = subprocess.run(
        [sys.executable, "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert f'File "{wrong_shape}", line ' in done.stderr
    assert "self.scale * model" in done.stderr
    assert "RuntimeError: mat1 and mat2" in done.stderr.splitlines()[-1]


CHECKED = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, DataLoader, TensorDataset, Subset, random_split

from nbgpu.recipes.own import OwnRecipe

ORDER = list(range(64))
random.shuffle(ORDER)


class Listed(Dataset):
    def __init__(self, order, bad=-1):
        self.order = list(order)
        self.bad = bad
        self.own = np.random.default_rng()

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"number {index} cannot be read")
        return {"x": torch.full((3,), self.order[index] / 64), "noise": NOISE * self.own.random()}


NOISE = 0.0


class Checked(OwnRecipe):
    val_fraction: float = 0.0
    batch_size: int = 2
    steps: int = 40
    val_every: int = 0

    def dataset(self):
        return Listed(ORDER)

    def model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        out = model(batch["x"])
        return out.square().mean()
"""


def checked(folder: Path, *changes: tuple[str, str]) -> str:
    text = CHECKED
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "checked.py"
    path.write_text(text)
    return str(path)


RETURN = "return out.square().mean()"
LOSS_LINE = CHECKED.splitlines().index("        " + RETURN) + 1
BAD_LOSSES = {
    "out.square().mean() * 1j": "a complex64 tensor with one number as 'loss'. Take .abs() or .real",
    "out.square()": "a float32 tensor of 2 x 1 as 'loss'. Is .mean() missing",
    "out.square().mean().item()": "a float. Only a tensor knows how it was computed",
    "out.square().mean(), out": "a tuple of 2. Return a dict",
    "None": "None. Is a `return` missing?",
    "out.square().mean().detach()": "that no weight of the model has a part in. Was it cut off by .detach()",
    "{'lost': out.square().mean()}": "a dict with 'lost' and no 'loss'. Name it so",
    "{'loss': out.square().mean(), 'each': out}": "a float32 tensor of 2 x 1 as 'each'",
}


MODEL_LINE = CHECKED.splitlines().index("        return nn.Linear(3, 1)") + 1
BAD_MODELS = {
    "nn.Sequential(nn.Tanh(), nn.LazyLinear(1))": "the layer '1' of the model is a LazyLinear, whose weights have no shape",
    "nn.LazyLinear(1)": "the layer '' of the model is a LazyLinear",
    "nn.Linear(3, 1), None": "`model` returned a tuple of 2, and must return an nn.Module",
    "None": "`model` returned None, and must",
}


@pytest.mark.parametrize("made", BAD_MODELS)
def test_what_is_no_model_is_told_with_its_line(tmp_path: Path, made: str) -> None:
    recipe = recipe_of(checked(tmp_path, ("return nn.Linear(3, 1)", f"return {made}")))
    with pytest.raises(nbgpu.ConfigError) as caught:
        recipe.build_model()
    assert str(caught.value).startswith(f"checked.py, line {MODEL_LINE}: {BAD_MODELS[made]}")


def test_what_is_wrong_on_every_rank_is_told_once(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    path = checked(tmp_path, ("return nn.Linear(3, 1)", "return None"))
    run = cluster2.train(str(path), runs_dir=str(tmp_path / "runs"))
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(400)
    told = str(caught.value)
    assert "PeerFailed" not in told
    assert told.count(f"ConfigError: checked.py, line {MODEL_LINE}: {BAD_MODELS['None']}") == 1, told


def test_a_lazy_model_that_has_seen_a_sample_is_a_model(tmp_path: Path) -> None:
    made = "return nn.Linear(3, 1)", "lazy = nn.LazyLinear(1); lazy(torch.zeros(1, 3)); return lazy"
    assert recipe_of(checked(tmp_path, made)).build_model().weight.shape == (1, 3)


@pytest.mark.parametrize("given", BAD_LOSSES)
def test_what_is_no_loss_is_told_with_its_line(tmp_path: Path, given: str) -> None:
    recipe = recipe_of(checked(tmp_path, (RETURN, f"return {given}")))
    with pytest.raises(nbgpu.ConfigError) as caught:
        recipe.loss(recipe.build_model(), {"x": torch.ones(2, 3)})
    assert str(caught.value).startswith(f"checked.py, line {LOSS_LINE}: `loss` must return the mean loss")
    assert BAD_LOSSES[given] in str(caught.value)


def test_weights_that_the_loss_does_not_use_are_named_with_the_setting(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    layers = "class Some(nn.ModuleDict):\n    def forward(self, x):\n        return self['used'](x)"
    made = "return Some({'used': nn.Linear(3, 1), 'left': nn.Linear(3, 1)})"
    start = "class Checked(OwnRecipe):"
    path = checked(tmp_path, (start, f"{layers}\n\n\n{start}"), ("return nn.Linear(3, 1)", made))
    settings = {"steps": 2, "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.train(path, **settings).wait(400)
    told = shown(caught.value)
    assert (
        "ConfigError: the loss does not use all weights of the model: none of left.weight, left.bias has a"
        in told
    )
    assert "Train with find_unused_parameters=True" in told
    assert "File " not in told
    assert cluster2.train(path, **settings, find_unused_parameters=True).wait(400).status == "finished"


def test_a_forgotten_return_is_told_with_the_function_s_line(tmp_path: Path) -> None:
    recipe = recipe_of(checked(tmp_path, (RETURN, "out.square().mean()")))
    with pytest.raises(
        nbgpu.ConfigError, match=rf"line {LOSS_LINE}: .* returned None. Is a `return` missing"
    ):
        recipe.loss(recipe.build_model(), {"x": torch.ones(2, 3)})


BAD_RESULTS = {
    "None": "it returned None. Return {} where there are none",
    "[1]": "it returned a list of 1",
    "{1: 2}": "it returned a dict",
    "{'weights': 2}": "one has the name 'weights'",
    "{'model': model}": "one of them cannot be written",
}


def with_result(folder: Path, given: str) -> Own:
    method = f"return out.square().mean()\n\n    def result(self, model, device):\n        return {given}"
    return recipe_of(checked(folder, (RETURN, method)))


@pytest.mark.parametrize("given", BAD_RESULTS)
def test_what_is_no_result_is_told_with_its_line(tmp_path: Path, given: str) -> None:
    recipe = with_result(tmp_path, given)
    with pytest.raises(nbgpu.ConfigError) as caught:
        recipe.result(recipe.build_model(), torch.device("cpu"))
    assert str(caught.value).startswith(
        f"checked.py, line {LOSS_LINE + 3}: `result` must return results by name"
    )
    assert BAD_RESULTS[given] in str(caught.value)


def test_a_result_may_have_tensors_and_any_name(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    given = "{'kind': 'a', 'step': torch.tensor(2.5), 'text': {'of': (1, model.weight.detach() * 0)}}"
    recipe = with_result(tmp_path, given)
    path = str(tmp_path / "checked.py")
    run = cluster2.train(path, steps=2, runs_dir=str(tmp_path / "runs")).wait(400)
    assert recipe.result(recipe.build_model(), torch.device("cpu")).items() <= run.result().items()
    assert run.result()["text"] == {"of": [1, [[0.0, 0.0, 0.0]]]}


def test_a_loss_of_one_number_is_one_and_floats_can_be_shown_beside_it(tmp_path: Path) -> None:
    given = "{'loss': out[:1].square().flatten(), 'largest': 3.5}"
    recipe = recipe_of(checked(tmp_path, (RETURN, f"return {given}")))
    terms = recipe.loss(recipe.build_model(), {"x": torch.ones(2, 3)})
    assert terms["loss"].shape == ()
    assert float(terms["largest"]) == 3.5
    with torch.no_grad():
        recipe.loss(recipe.build_model(), {"x": torch.ones(2, 3)})


BAD_DATASETS = {
    "(number for number in ORDER)": "a generator",
    "None": "None",
    "DataLoader(Listed(ORDER))": "a DataLoader, .*Give the loader's dataset",
    "type('Stream', (IterableDataset,), {'__iter__': lambda self: iter(())})()": "a Stream",
    "{'x': torch.ones(5, 3)}": "a dict, .*give a list of samples",
}


@pytest.mark.parametrize("given", BAD_DATASETS)
def test_what_is_no_dataset_is_told_with_its_line(tmp_path: Path, given: str) -> None:
    line = CHECKED.splitlines().index("        return Listed(ORDER)") + 1
    recipe = recipe_of(checked(tmp_path, ("return Listed(ORDER)", f"return {given}")))
    with pytest.raises(
        nbgpu.ConfigError, match=f"checked.py, line {line}: `dataset` returned {BAD_DATASETS[given]}"
    ):
        recipe.build_loaders(0, 2)


@pytest.mark.parametrize("wrapped", ["{}", "Subset({}, range(63, -1, -1))"])
@pytest.mark.parametrize("val_fraction", [0.0, 0.3])
def test_a_sample_that_fails_is_named_as_the_person_counts_it(
    tmp_path: Path, wrapped: str, val_fraction: float
) -> None:
    made = wrapped.format("Listed(ORDER, bad=41)")
    recipe = recipe_of(
        checked(tmp_path, ("return Listed(ORDER)", f"return {made}")), val_fraction=val_fraction, seed=3
    )
    loaders = recipe.build_loaders(0, 1)
    with pytest.raises(ValueError, match="number 41 cannot be read") as caught:
        list(loaders.train), list(loaders.val)
    assert caught.value.__notes__ == ["in sample 41 of the dataset"]


DIFFERENT = {
    "Listed(ORDER[dist.get_rank():])": "`dataset` differs in length: 64 on rank 0, 63 on rank 1",
    "Listed(np.random.default_rng(dist.get_rank()).permutation(64))": "of `dataset` is another one on rank 1 than on rank 0",
}


@row(
    "the ranks of a run have another number of samples, or another order of them",
    "the run ends before its first step; what differs is said with the ranks; the next run trains",
    bound_s=None,
)
@pytest.mark.parametrize("given", DIFFERENT)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_with_different_data_do_not_train(
    cluster2: nbgpu.Cluster, tmp_path: Path, given: str, num_workers: int
) -> None:
    path = checked(tmp_path, ("return Listed(ORDER)", f"import torch.distributed as dist; return {given}"))
    settings = {"num_workers": num_workers, "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(nbgpu.RankError, match="the ranks do not have the same data") as caught:
        cluster2.train(path, **settings).wait(400)
    assert DIFFERENT[given] in str(caught.value)
    assert "Take no share by rank" in str(caught.value)
    run = cluster2.train(checked(tmp_path), **settings).wait(400)
    assert run.status == "finished"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_shuffled_is_the_same_on_all_ranks_and_random_samples_are_no_difference(
    cluster2: nbgpu.Cluster, tmp_path: Path, num_workers: int
) -> None:
    """The order is drawn where the file is run, which worker processes do, too; each rank's samples have
    noise from a generator of their own."""
    path = checked(
        tmp_path,
        ("NOISE = 0.0", "NOISE = 1.0"),
        ("self.order[index] / 64", "ORDER[index] / 64"),
        (RETURN, "return {'loss': out.square().mean(), 'seen': (64 * batch['x'][:, 0]).sum()}"),
    )
    cluster2.execute("import random; random.seed(rank); torch.manual_seed(rank)")
    run = cluster2.train(path, steps=16, num_workers=num_workers, runs_dir=str(tmp_path / "runs")).wait(400)
    # Each of 64 samples once in an epoch: on two ranks with the same order.
    assert run.metrics()["seen"].dropna().sum() == sum(range(64))


@row(
    "a recipe's loss is complex, or no loss at all",
    "the run ends in its first step, on every rank; the line is named, with what came and what is expected",
    bound_s=None,
)
def test_a_complex_loss_ends_the_run_in_its_first_step(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    path = checked(tmp_path, (RETURN, "return out.square().mean() * (1 + 1j)"))
    with pytest.raises(nbgpu.RankError, match=rf"checked.py, line {LOSS_LINE}: .*complex64") as caught:
        cluster2.train(path, runs_dir=str(tmp_path / "runs")).wait(400)
    assert all(failure.error_type == "ConfigError" for failure in caught.value.failures)


TIED = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbgpu.recipes.own import OwnRecipe


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.inner = nn.Linear(8, 8)
        self.output = nn.Linear(8, 50, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.inner(self.frozen(self.embedding(x))))


class Tied(OwnRecipe):
    """Has tied and frozen weights."""

    def dataset(self):
        return TensorDataset(torch.arange(48))

    def model(self):
        return Words()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[0])
'''


def test_tied_weights_count_once_and_train_with_either_strategy(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "tied.py"
    path.write_text(TIED)
    losses = {}
    for strategy, num_shards in (("ddp", 1), ("fsdp", 2)):
        config = train_config(str(path), strategy=strategy, batch_size=4)
        planned = fake_steps.parts(without_exchange(config), torch.device("cpu"), 2)
        assert planned["parameters"] == 4 * (50 * 8 + 2 * (8 * 8 + 8)) / num_shards
        run = cluster2.train(
            str(path),
            strategy=strategy,
            batch_size=4,
            steps=4,
            lr=0.01,
            threads=1,
            runs_dir=str(tmp_path / "runs"),
        )
        run.wait(400)
        records, _ = run.reader.since()
        losses[strategy] = {
            (r.rank, r.step): r.values["loss"]
            for r in records
            if isinstance(r, Sample) and "loss" in r.values
        }
    assert len(losses["ddp"]) == 2 * 4
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-4)
