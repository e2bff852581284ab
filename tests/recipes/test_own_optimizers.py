"""Recipes of one's own with their own parameter groups, optimizer and schedule, on real ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rows import row
from safetensors.torch import load_file

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.config import OwnConfig, train_config
from nbgpu.engine.model.parameter_groups import groups_of
from nbgpu.recipes.own import Own
from nbgpu.run_folder import checkpoint_files

RECIPE = """
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from nbgpu.recipes.own import OwnRecipe


class Slowing(Optimizer):
    \"\"\"Counts its steps in numbers that are no tensors.\"\"\"

    def __init__(self, groups):
        super().__init__(groups, {"num_steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                seen = self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                p -= group["lr"] * (seen * group["num_steps"]) ** -0.1 * p.grad


class Points(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((3,), index / 48)
        return {"x": x * torch.rand(3), "bad": BAD if index == 7 else 1.0}


BAD = 1.0


class Grouped(OwnRecipe):
    val_fraction: float = 0.0
    batch_size: int = 2
    steps: int = 12
    lr: float = 0.02
    checkpoint_every: int = 5
    keep_checkpoints: int = 20
    val_every: int = 0
    slow: float = 0.1

    def dataset(self):
        return Points()

    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def loss(self, model, batch):
        return ((model(batch["x"]) - 1).squeeze(1) * batch["bad"]).square().mean()

    def parameter_groups(self, model):
        return [{"params": model[0].parameters(), "lr_factor": self.slow, "weight_decay": 0.0, "name": "slow"}]

    def optimizer(self, groups):
        return torch.optim.NAdam(groups)

    def schedule(self, step, num_steps):
        return 1 - step / num_steps
"""
GROUPS = (
    'return [{"params": model[0].parameters(), "lr_factor": self.slow, "weight_decay": 0.0, "name": "slow"}]'
)
OPTIMIZER = "return torch.optim.NAdam(groups)"
SCHEDULE = "return 1 - step / num_steps"


def written(folder: Path, *changes: tuple[str, str], name: str = "grouped") -> str:
    text = RECIPE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


def without(method: str) -> tuple[str, str]:
    """The change that leaves a method out."""
    start = RECIPE.index(f"    def {method}(self")
    end = RECIPE.find("\n\n", start)
    return (RECIPE[start : end if end > 0 else None], "")


def recipe_of(path: str) -> tuple[Own, OwnConfig]:
    config = train_config(path)
    assert isinstance(config, OwnConfig)
    return Own(config), config


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(RECIPE.splitlines(), 1) if line.strip() == text)


BAD_GROUPS = {
    "None": "it returned None. Is a `return` missing",
    "{'params': model[0].parameters()}": "it returned a dict. Is a `return` missing, or a list around the dicts",
    "[model[0].parameters()]": "entry 0 is a generator. Give {'params': ..., 'lr_factor': ...}",
    "[{'lr_factor': 0.1}]": "entry 0 has no 'params'",
    "[{'params': model[0].parameters(), 'lr': 0.1}]": "entry 0 has 'lr'. For another rate give 'lr_factor'",
    "[{'params': model[0].parameters(), 'betas': (0.9, 0.9)}]": "entry 0 has 'betas'. What an optimizer needs besides",
    "[{'params': [nn.Parameter(torch.ones(2))]}]": "'params' of entry 0 has a float32 tensor of 2 that is not a parameter of",
    "[{'params': 3}]": "'params' of entry 0 has an int that is not a parameter of the model",
    "[{'params': model.parameters()}, {'params': model[1].bias}]": "1.bias is in entries 0 and 1. Leave it out of one",
    "[{'params': model[1].bias, 'lr_factor': -1}]": "'lr_factor' of entry 0 is -1. Give a finite number, 0 or above",
    "[{'params': model[1].bias, 'weight_decay': float('nan')}]": "'weight_decay' of entry 0 is nan. Give a finite",
    "[{'params': model[1].bias, 'lr_factor': torch.ones(())}]": "'lr_factor' of entry 0 is a float32 tensor with one",
    "[{'params': model[1].bias, 'name': 'a b'}]": "'name' of entry 0 is 'a b'. Give letters",
}


@pytest.mark.parametrize("given", BAD_GROUPS)
def test_wrong_groups_are_told_with_their_line(tmp_path: Path, given: str) -> None:
    recipe, config = recipe_of(written(tmp_path, (GROUPS, f"return {given}")))
    with pytest.raises(nbgpu.ConfigError) as caught:
        groups_of(config, recipe, recipe.build_model())
    said = f"grouped.py, line {line_of(GROUPS)}: `parameter_groups` must return a list of dicts with 'params'"
    assert str(caught.value).startswith(said)
    assert BAD_GROUPS[given] in str(caught.value)


BAD_OPTIMIZERS = {
    "None": "it returned None. Is a `return` missing",
    "groups": "it returned a list of 2. Return one, such as torch.optim.RMSprop(groups)",
    "torch.optim.SGD([p for g in groups for p in g['params']], 0.1)": "the groups of its SGD are others. Give it `groups`",
    "torch.optim.SGD(groups[:1], 0.1)": "the groups of its SGD are others",
    "torch.optim.LBFGS(groups[0]['params'])": "the groups of its LBFGS are others",
    "type('Searching', (Slowing,), {'step': lambda self, closure: None})(groups)": "Searching computes the loss several times",
    "torch.optim.SGD([{**g, 'when': print} for g in groups], 0.1)": "its groups have 'when', which no checkpoint can hold",
}


@pytest.mark.parametrize("given", BAD_OPTIMIZERS)
def test_what_is_no_optimizer_is_told_with_its_line(tmp_path: Path, given: str) -> None:
    recipe, config = recipe_of(written(tmp_path, (OPTIMIZER, f"return {given}")))
    with pytest.raises(nbgpu.ConfigError) as caught:
        recipe.optimizer(groups_of(config, recipe, recipe.build_model()))
    said = f"grouped.py, line {line_of(OPTIMIZER)}: `optimizer` must return a torch.optim.Optimizer over the groups"
    assert str(caught.value).startswith(said)
    assert BAD_OPTIMIZERS[given] in str(caught.value)


BAD_FACTORS = {
    "None": "for step 3 it returned None. Is a `return` missing",
    "-0.5": "for step 3 it returned -0.5.",
    "float('nan')": "for step 3 it returned nan.",
    "True": "for step 3 it returned True.",
    "torch.tensor(1.0)": "for step 3 it returned a float32 tensor with one number. A tensor becomes a number by .item()",
}


@pytest.mark.parametrize("given", BAD_FACTORS)
def test_what_is_no_factor_of_the_rate_is_told_with_its_line(tmp_path: Path, given: str) -> None:
    recipe, _ = recipe_of(written(tmp_path, (SCHEDULE, f"return {given}")))
    with pytest.raises(nbgpu.ConfigError) as caught:
        recipe.schedule(3, 12)
    said = f"grouped.py, line {line_of(SCHEDULE)}: `schedule` must return the factor on `lr`"
    assert str(caught.value).startswith(said)
    assert BAD_FACTORS[given] in str(caught.value)


def test_settings_that_a_method_replaces_are_refused_and_fsdp_too(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(nbgpu.ConfigError) as caught:
        train_config(path, optimizer="sgd", momentum=0.5, warmup_steps=3, schedule="step", strategy="fsdp")
    said = str(caught.value)
    assert "optimizer='sgd' means nothing" in said
    assert "its method `optimizer` decides" in said
    assert "warmup_steps=3 means nothing" in said
    assert "its method `schedule` decides" in said
    assert "strategy='fsdp' does not go with the method `optimizer`" in said
    path = written(tmp_path, without("optimizer"), without("schedule"))
    config = train_config(path, optimizer="adam", schedule="step", lr_decay=0.2, strategy="fsdp")
    assert config.schedule == "step"


def test_a_method_beside_a_setting_of_its_name_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ("slow: float = 0.1", 'slow: float = 0.1\n    schedule: str = "constant"'))
    with pytest.raises(nbgpu.ConfigError, match="'schedule' is a setting here and a method below"):
        train_config(path)


def test_an_optimizer_from_another_class_has_to_be_named(tmp_path: Path) -> None:
    mixed = (
        "class Grouped(OwnRecipe):",
        "class Mixed:\n    def optimizer(self, groups):\n        return Slowing(groups)\n\n\nclass Grouped(Mixed, OwnRecipe):",
    )
    with pytest.raises(nbgpu.ConfigError, match=r"Write `optimizer = Mixed\.optimizer` into it"):
        recipe_of(written(tmp_path, without("optimizer"), mixed))
    named = (without("optimizer")[0], "    optimizer = Mixed.optimizer")
    recipe, config = recipe_of(written(tmp_path, named, mixed))
    made = recipe.optimizer(groups_of(config, recipe, recipe.build_model()))
    assert type(made).__name__ == "Slowing"


def train(cluster: nbgpu.Cluster, path: str, tmp_path: Path, **settings: Any) -> Run:
    run = cluster.train(path, threads=1, runs_dir=str(tmp_path / "runs"), **settings).wait(400)
    assert run.status == "finished", run.failures
    return run


def numbers(run: Run, after_step: int = 0) -> pd.DataFrame:
    columns = ["rank", "step", "loss", "grad_norm", "lr", "lr_of_slow"]
    frame = run.metrics()[columns].dropna()
    frame = frame[frame["step"] > after_step]
    return frame.sort_values(["rank", "step"], ignore_index=True)


def same_weights(one: Run, other: Run) -> bool:
    names = (checkpoint_files.MODEL, checkpoint_files.OPTIMIZER)
    return all(
        (one.checkpoint() / name).read_bytes() == (other.checkpoint() / name).read_bytes() for name in names
    )


OPTIMIZERS = [
    "Slowing(groups)",
    pytest.param("torch.optim.NAdam(groups)", marks=pytest.mark.long),
    pytest.param("torch.optim.SGD(groups, momentum=0.9, fused=True)", marks=pytest.mark.long),
    pytest.param("torch.optim.AdamW(groups, amsgrad=True)", marks=pytest.mark.long),
    pytest.param("torch.optim.Rprop(groups)", marks=pytest.mark.long),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_at_its_rates_and_goes_on_to_the_last_bit(
    cluster3: nbgpu.Cluster, tmp_path: Path, optimizer: str
) -> None:
    path = written(tmp_path, (OPTIMIZER, f"return {optimizer}"))
    straight = train(cluster3, path, tmp_path)
    found = numbers(straight)
    rates = 0.02 * (1 - np.arange(12) / 12)
    for rank in range(3):
        own = found[found["rank"] == rank]
        np.testing.assert_allclose(own["lr"], rates)
        np.testing.assert_allclose(own["lr_of_slow"], 0.1 * rates)
    assert (
        "the learning rate shown as lr is that of rest; slow at 0.1 times it (lr_of_slow)" in straight.notes()
    )
    half_way = straight.folder / "checkpoints" / checkpoint_files.checkpoint_name(5)
    about = checkpoint_files.state(half_way)
    assert about["optimizer_class"] == optimizer.removeprefix("torch.optim.").partition("(")[0]
    resumed = train(cluster3, path, tmp_path, resume=str(half_way))
    expected = numbers(straight, after_step=5)
    assert len(expected) == 3 * 7
    pd.testing.assert_frame_equal(numbers(resumed, after_step=5), expected, check_exact=True)
    assert same_weights(resumed, straight)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_groups_go_with_the_optimizer_of_the_settings(
    cluster3: nbgpu.Cluster, tmp_path: Path, strategy: str
) -> None:
    path = written(tmp_path, without("optimizer"))
    run = train(cluster3, path, tmp_path, strategy=strategy, slow=0.0)
    weights = [
        load_file(
            run.folder / "checkpoints" / checkpoint_files.checkpoint_name(step) / checkpoint_files.MODEL
        )
        # The one of step 10 is left out where that of step 5 is still being written.
        for step in (5, 12)
    ]
    # At no rate, and with no weight decay, these stay as they are.
    assert torch.equal(weights[0]["0.weight"], weights[1]["0.weight"])
    assert not torch.equal(weights[0]["1.weight"], weights[1]["1.weight"])


def test_a_checkpoint_of_another_optimizer_is_refused(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    first = train(cluster3, written(tmp_path), tmp_path)
    path = written(tmp_path, (OPTIMIZER, "return torch.optim.Adagrad(groups)"))
    run = cluster3.train(path, threads=1, runs_dir=str(tmp_path), steps=14, resume=str(first.checkpoint()))
    with pytest.raises(nbgpu.RankError, match="its optimizer is NAdam, and this run's is Adagrad"):
        run.wait(400)


@row(
    "the optimizer of a person's own recipe keeps what no checkpoint can hold",
    "the run ends with its first step and says what it is; ranks stay",
    bound_s=None,
)
def test_a_state_that_cannot_be_saved_ends_the_run_in_its_first_step(
    cluster3: nbgpu.Cluster, tmp_path: Path
) -> None:
    keeps = ("p -= group", 'self.state[p]["where"] = object()\n                p -= group')
    path = written(tmp_path, keeps, (OPTIMIZER, "return Slowing(groups)"))
    run = cluster3.train(path, threads=1, runs_dir=str(tmp_path))
    with pytest.raises(nbgpu.RankError, match=r"state of the optimizer Slowing cannot be saved.*'where', a "):
        run.wait(400)
    assert max(status.step for status in run.statuses()) <= 1


@row(
    "a bad loss with the optimizer of a person's own recipe",
    "the step is left out on all ranks: weights and optimizer stay as they are, to the last bit",
    bound_s=None,
)
def test_a_bad_step_is_left_out(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    path = written(tmp_path, ("BAD = 1.0", 'BAD = float("nan")'), (OPTIMIZER, "return Slowing(groups)"))
    run = train(cluster3, path, tmp_path, on_nonfinite="skip", steps=16, checkpoint_every=1)
    records, _ = run.reader.since()
    bad = sorted({r.step for r in records if getattr(r, "kind", "") == "nonfinite"})
    assert len(bad) == 2, "each of the two epochs has the bad sample once"
    for step in bad:
        folders = [run.folder / "checkpoints" / checkpoint_files.checkpoint_name(s) for s in (step - 1, step)]
        if not all(folder.exists() for folder in folders):
            continue  # a checkpoint is left out while another one is being written
        before, after = (load_file(folder / checkpoint_files.MODEL) for folder in folders)
        assert all(torch.equal(before[name], after[name]) for name in before)
        values = [checkpoint_files.state(folder)["optimizer_values"] for folder in folders]
        assert values[0] == values[1]
    counted = checkpoint_files.state(run.checkpoint())["optimizer_values"]
    assert set(counted.values()) == {14}


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], Run], None]:
    def wait(condition: Callable[[], bool], run: Run) -> None:
        give_up_s = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < give_up_s, f"{run} {run.failures}"
            time.sleep(0.02)

    return wait


@pytest.mark.long
def test_a_rate_that_is_set_counts_for_every_group(
    cluster3: nbgpu.Cluster, tmp_path: Path, wait_until: Callable[[Callable[[], bool], Run], None]
) -> None:
    path = written(tmp_path, (SCHEDULE, "return 0.5"))
    run = cluster3.train(path, threads=1, runs_dir=str(tmp_path), steps=100_000, checkpoint_every=0)

    def newest(name: str) -> float:
        frame = run.metrics()
        return float(frame[name].dropna().iloc[-1]) if name in frame else 0.0

    try:
        wait_until(lambda: newest("lr") == 0.01, run)
        run.set(lr=0.002, weight_decay=0.25)
        wait_until(lambda: newest("lr") == 0.001, run)
        wait_until(lambda: newest("lr_of_slow") == pytest.approx(0.0001), run)
    finally:
        run.stop()
        run.wait(400)
    groups = checkpoint_files.state(run.checkpoint())["optimizer"]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.25]


@pytest.mark.long
@row(
    "a rank of a run with the optimizer of a person's own recipe dies",
    "the new rank gets that optimizer's state, and the weights at the end are those of an unhurt run, to the last bit",
    bound_s=None,
)
def test_a_new_rank_gets_its_state(
    cluster3: nbgpu.Cluster, tmp_path: Path, wait_until: Callable[[Callable[[], bool], Run], None]
) -> None:
    # A step takes long enough for a rank to die in the middle of the run.
    slowly = ("p -= group", "__import__('time').sleep(0.02)\n                p -= group")
    path = written(tmp_path, (OPTIMIZER, "return Slowing(groups)"), slowly)
    settings = {"steps": 40, "checkpoint_every": 0}
    unhurt = train(cluster3, path, tmp_path, **settings)
    run = cluster3.train(path, threads=1, runs_dir=str(tmp_path / "runs"), **settings)
    wait_until(lambda: max(s.step for s in run.statuses()) >= 4, run)
    os.kill(cluster3.pids[1], signal.SIGKILL)
    assert run.wait(400).status == "finished", run.failures
    records, _ = run.reader.since()
    assert any(getattr(record, "kind", "") == "heal" for record in records)
    assert same_weights(run, unhurt)
    states = [checkpoint_files.state(each.checkpoint()) for each in (run, unhurt)]
    for name in ("optimizer", "optimizer_values"):
        assert states[0][name] == states[1][name]
