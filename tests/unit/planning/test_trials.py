"""Which trials a sweep has: grids, draws, every bad combination at once, and the file that holds them."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pretend_gpus
import pytest

from nbgpu.client.host import gpu_choice
from nbgpu.client.sweeps.starting import places
from nbgpu.client.sweeps.trial import CURVE_POINTS, Curve
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, flags
from nbgpu.errors import ConfigError, NoFreeGpuError
from nbgpu.machine.devices import cpu
from nbgpu.planning import trials
from nbgpu.planning.trials import SweepConfig, SweepPlan

ONE_RANK = [[cpu(0)]]


def trials_of(**settings: Any) -> Sequence[Any]:
    return checked(**settings).trials


def checked(**settings: Any) -> SweepPlan:
    return trials.checked(trials.plan("autoencoder", settings), ONE_RANK)


def refused(**settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(**settings)
    return str(caught.value).splitlines()


def test_a_grid_has_every_combination_and_what_is_no_list_is_shared() -> None:
    plan = checked(lr=[1e-4, 1e-3], seed=[0, 1], channels=(8, 16), steps=7)
    assert plan.trials == [{"lr": lr, "seed": seed} for lr in (1e-4, 1e-3) for seed in (0, 1)]
    assert plan.shared["steps"] == 7
    assert plan.settings(3).lr == 1e-3
    assert plan.settings(3).model_dump()["channels"] == (8, 16)


@pytest.mark.parametrize("order", [["adamw", "sgd"], ["sgd", "adamw"]])
def test_a_shared_setting_is_for_the_trials_in_which_it_counts(order: list[str]) -> None:
    plan = checked(optimizer=order, momentum=0.5)
    momentum = {plan.settings(n).optimizer: plan.settings(n).momentum for n in range(2)}
    assert momentum == {"sgd": 0.5, "adamw": 0.9}
    (line,) = refused(lr=[1e-3, 1e-4], momentum=0.5)[1:]
    assert "momentum=0.5 counts only with optimizer='sgd'" in line


def test_a_sweep_has_the_name_that_its_runs_have(tmp_path: Path) -> None:
    folder = trials.create_folder(checked(lr=[1e-3, 1e-4], run_name="first-try", runs_dir=str(tmp_path)))
    assert "-sweep-first-try-" in folder.name


def test_text_from_a_command_line_becomes_the_fields_values() -> None:
    given = {"lr": "1e-4,1e-3", "channels": "8 16,8 32", "warmup_steps": "none,3", "compile": "true,false"}
    plan = checked(**{name: trials.from_text(text) for name, text in given.items()})
    assert len(plan.trials) == 16
    assert plan.trials[0] == {"lr": 1e-4, "channels": (8, 16), "warmup_steps": None, "compile": True}
    assert plan.trials[-1] == {"lr": 1e-3, "channels": (8, 32), "warmup_steps": 3, "compile": False}


def test_text_may_be_one_number_or_one_for_each_axis(tmp_path: Path) -> None:
    sizes = trials.from_text("16, 16 24 32")
    plan = checked(patch_size=sizes)
    assert plan.trials == [{"patch_size": 16}, {"patch_size": (16, 24, 32)}]
    plan.write(tmp_path)
    again = SweepPlan.read(tmp_path)
    assert [again.settings(i) for i in range(2)] == [plan.settings(i) for i in range(2)]


def test_draws_stay_within_their_ranges_and_are_the_same_for_the_same_seed() -> None:
    asked = {
        "lr": "1e-5..1e-2:log",
        "batch_size": "1..8",
        "clip_norm": "0.5 .. 2",
        "seed": [3, 4],
        "random": 200,
    }
    drawn = trials_of(**asked)
    assert drawn == trials_of(**asked)
    assert drawn != trials_of(**asked, random_seed=1)
    assert all(1e-5 <= t["lr"] <= 1e-2 and 0.5 <= t["clip_norm"] <= 2 for t in drawn)
    assert {t["batch_size"] for t in drawn} == set(range(1, 9))
    assert {t["seed"] for t in drawn} == {3, 4}
    # Evenly in the logarithm: as many below the middle decade's middle as above, not one in thirty.
    below = sum(math.log10(t["lr"]) < -3.5 for t in drawn)
    assert 70 < below < 130


def test_a_draw_from_lists_repeats_no_combination() -> None:
    drawn = trials_of(lr=[1e-4, 1e-3, 1e-2], seed=[0, 1], random=6)
    assert len({str(trial) for trial in drawn}) == 6


def test_a_draw_from_a_huge_grid_does_not_make_the_grid() -> None:
    ten = list(range(1, 11))
    settings = dict.fromkeys(("seed", "batch_size", "warmup_steps", "val_every", "log_every"), ten)
    tenths = [number / 10_000 for number in ten]
    drawn = trials.plan(
        "autoencoder", {**settings, "lr": tenths, "weight_decay": tenths, "clip_norm": ten, "random": 3}
    ).trials
    assert len({str(trial) for trial in drawn}) == 3


def test_a_draw_from_lists_takes_the_members_of_the_grid_by_their_numbers() -> None:
    lists: dict[str, list[Any]] = {"lr": [1e-4, 1e-3], "seed": [0, 1, 2], "batch_size": [2, 4, 8, 16]}
    grid = list(trials.plan("autoencoder", lists).trials)
    drawn = trials.plan("autoencoder", {**lists, "random": 20, "random_seed": 5}).trials
    assert drawn == random.Random(5).sample(grid, 20)


def test_every_bad_combination_is_told_once_with_what_it_depends_on() -> None:
    lines = refused(lr=[20.0, 1e-3], min_lr=[0.0, 0.1], patch_size=[16, 18], seed=[0, 1])
    assert lines[0] == "14 of 16 trials cannot run, and none was started:"
    told = "\n".join(lines[1:])
    assert "lr=20.0 (8 trials): lr = 20.0 is not valid. Give a value within: above 0, at most 10" in told
    assert "patch_size=18 (8 trials): patch_size = 18 is not valid" in told
    assert "lr=0.001, min_lr=0.1, patch_size=16 (2 trials): min_lr=0.1 must not be above lr=0.001" in told
    assert len(lines) == 4


def test_what_the_ranks_cannot_do_is_told_before_they_start() -> None:
    lines = refused(global_batch_size=[3, 4], accumulate=[2])
    assert "global_batch_size=3: global_batch_size=3 must be a multiple of 2" in lines[1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 1e-3}, "nothing is varied"),
        ({"lr": "1e-5..1e-2:log"}, "is a range, to draw from: give random=N"),
        ({"lr": "1e-2..1e-5", "random": 2}, "the first end of a range must be below the second"),
        ({"weight_decay": "0..1:log", "random": 2}, "must begin above 0"),
        ({"batch_size": "1.5..3", "random": 2}, "must be whole numbers"),
        ({"lr": []}, "has no value"),
        ({"seed": [1, 1]}, "has a value twice"),
        ({"seed": [1, 2], "random": 3}, "more than the 2 combinations"),
        ({"batch_size": "1..2", "random": 3}, "only 2 different combinations came up"),
        ({"seed": list(range(200)), "steps": list(range(1, 200))}, "at most 10000"),
        ({"runs_dir": ["a", "b"]}, "runs_dir cannot be swept"),
        ({"seed": [0, 1], "keep": True}, "keep does not go with a sweep"),
        ({"seed": [0, 1], "telemetry": False}, "telemetry=False records nothing"),
        ({"seed": [0, 1], "val_every": 0}, "Take sort_by='loss'"),
        ({"seed": [0, 1], "larning_rate": 1}, "larning_rate is not a setting"),
        ({"seed": [0, 1], "goal": "low"}, "goal = 'low' is not valid"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(settings: dict[str, Any], told: str) -> None:
    assert told in "\n".join(refused(**settings))


def test_the_file_gives_back_the_same_sweep(tmp_path: Path) -> None:
    plan = checked(lr="1e-5..1e-2:log", channels=[(8, 16), (8, 32)], warmup_steps=[None, 3], random=8)
    plan.write(tmp_path)
    again = SweepPlan.read(tmp_path, parallel=3)
    assert [again.settings(i) for i in range(8)] == [plan.settings(i) for i in range(8)]
    assert {name: str(values) for name, values in again.varied.items()}["lr"] == "1e-05..0.01:log"
    assert again.config.parallel == 3
    with pytest.raises(ConfigError, match=r"lr cannot be changed"):
        SweepPlan.read(tmp_path, lr=[1])
    with pytest.raises(ConfigError, match=r"is not a sweep's folder"):
        SweepPlan.read(tmp_path / "elsewhere")
    (tmp_path / trials.FILE).write_text("[sweep]\n")
    with pytest.raises(ConfigError, match="is not what nbgpu writes"):
        SweepPlan.read(tmp_path)


def test_no_setting_of_a_sweep_has_the_name_of_another() -> None:
    for model in TRAIN_CONFIGS.values():
        names = [*SweepConfig.model_fields, *ClusterConfig.model_fields, *model.model_fields]
        assert len(set(names)) == len(names)
    models = [SweepConfig, ClusterConfig, TRAIN_CONFIGS["autoencoder"]]
    with pytest.raises(SystemExit) as caught:
        flags.parse(models, ["--help"], "x", hidden=("recipe",), as_text=models[-1])
    assert caught.value.code == 0


@pytest.mark.parametrize(
    ("ranks", "parallel", "share", "expected"),
    [
        (1, None, False, ["A", "B", "C", "D"]),
        (2, None, False, ["A,B", "C,D"]),
        (3, None, False, ["A,B,C"]),
        (8, None, False, ["A,B,C,D"]),
        (1, 2, False, ["A", "B"]),
        (1, 6, True, ["A", "B", "C", "D", "A", "B"]),
    ],
)
def test_each_place_gets_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch, ranks: int, parallel: int | None, share: bool, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend_gpus.install([pretend_gpus.PretendGpu(uuid=uuid) for uuid in "ABCD"], patch=monkeypatch)
    assert places(ClusterConfig(ranks=ranks, share_gpus=share), parallel) == expected
    with pytest.raises(ConfigError, match=r"parallel=5 with ranks=1 takes 5 GPUs, and there are 4"):
        places(ClusterConfig(ranks=1), 5)


def test_no_wait_for_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    in_use = [(os.getpid(), pretend_gpus.GIB)]
    pretend_gpus.install(
        [pretend_gpus.PretendGpu(uuid=uuid, processes=in_use) for uuid in "AB"], patch=monkeypatch
    )
    monkeypatch.setattr(gpu_choice, "wait", lambda _: pytest.fail("it waits"))
    with pytest.raises(ConfigError, match=r"parallel=2 with ranks=2 takes 4 GPUs, and there are 2"):
        places(ClusterConfig(ranks=2, wait=True), 2)


@pytest.mark.parametrize(("parallel", "expected"), [(None, ["A", "B"]), (1, ["A"])])
def test_gpus_that_are_taken_after_the_wait_do_not_end_it(
    monkeypatch: pytest.MonkeyPatch, parallel: int | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend_gpus.install([pretend_gpus.PretendGpu(uuid=uuid) for uuid in "AB"], patch=monkeypatch)
    assert places(ClusterConfig(ranks=1, wait=True), parallel) == expected

    def taken(_: ClusterConfig) -> NoReturn:
        raise NoFreeGpuError("none is free")

    monkeypatch.setattr(gpu_choice, "choose", taken)
    assert places(ClusterConfig(ranks=1, wait=True), parallel) == ["A"]


def test_cpu_places_have_two_ranks_in_all_unless_more_are_asked_for() -> None:
    assert places(ClusterConfig(gpus="none", ranks=1), None) == ["none", "none"]
    assert places(ClusterConfig(gpus="none", ranks=2), None) == ["none"]
    assert places(ClusterConfig(gpus="none", ranks=2), 3) == ["none"] * 3


def test_a_long_curve_is_thinned_and_keeps_its_best_point() -> None:
    curve = Curve("max")
    for step in range(3 * CURVE_POINTS):
        curve.add(step, 1e9 if step == 1000 else float(step) if step % 7 else math.nan)
    assert len(curve.values) < CURVE_POINTS
    assert curve.best() == (1000, 1e9)
    assert curve.steps == sorted(curve.steps)
    curve.cut_after(999)
    assert curve.steps[-1] <= 999
    best = curve.best()
    assert best is not None
    assert best[1] < 1e9
