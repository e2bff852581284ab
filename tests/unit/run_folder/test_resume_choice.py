"""Which checkpoint a run begins with, and what is refused before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nbgpu.config import ClusterConfig, TrainConfig, train_config
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.errors import ConfigError, RunError
from nbgpu.machine.devices import cpu
from nbgpu.protocol.records import Chosen
from nbgpu.run_folder import checkpoint_files, resume
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.settling import SettledConfig, settle

TENSORS = {"model.weight": torch.ones(2), "optimizer.0.step": torch.tensor(1.0)}


def settings(runs_dir: Path, **values: Any) -> TrainConfig:
    return train_config("autoencoder", **{"steps": 20, "runs_dir": str(runs_dir), **values})


def choose(config: TrainConfig) -> Chosen:
    raise AssertionError("no setting is left to the data")


def run_with_checkpoints(runs_dir: Path, *steps: int, **values: Any) -> Path:
    config = settings(runs_dir, **values)
    folder = runs.create(SettledConfig(config), ClusterConfig())
    for step in steps:
        checkpoint.save(folder, step, TENSORS, {"config": config.model_dump(mode="json")})
    return folder


def damage(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "optimizer.safetensors").write_bytes(b"")


def test_without_resume_a_run_begins_with_the_first_step(tmp_path: Path) -> None:
    run_with_checkpoints(tmp_path, 5)
    assert resume.find(settings(tmp_path)) == resume.Beginning()


def test_auto_takes_what_was_written_last_over_all_runs_of_the_recipe(tmp_path: Path) -> None:
    first = run_with_checkpoints(tmp_path, 5)
    second = run_with_checkpoints(tmp_path, 3)
    (tmp_path / "a note.txt").write_text("not a run")
    (tmp_path / "empty").mkdir()
    beginning = resume.find(settings(tmp_path, resume="auto"))
    path = second / "checkpoints" / "step-00000003"
    assert beginning == resume.Beginning(str(path), 3, (f"going on from step-00000003 of {second.name}",))
    checkpoint.save(first, 6, TENSORS, {"config": settings(tmp_path).model_dump(mode="json")})
    assert resume.find(settings(tmp_path, resume="auto")).step == 6


def test_auto_names_every_damaged_one_on_the_way(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 5, 10, 15)
    for step in (10, 15):
        damage(folder / "checkpoints" / f"step-{step:08d}")
    os.utime(folder / "checkpoints" / "step-00000010")
    beginning = resume.find(settings(tmp_path, resume="auto"))
    assert beginning.step == 5
    assert [note.split(" of ")[0] for note in beginning.notes] == [
        "checkpoint step-00000015",
        "checkpoint step-00000010",
    ]
    assert "is damaged (optimizer.safetensors: has 0 bytes and should have" in beginning.notes[0]
    assert beginning.notes[0].endswith(f"; going on from step-00000005 of {folder.name}")


@pytest.mark.parametrize("num_damaged", [0, 1])
def test_auto_with_nothing_whole_says_that_it_starts_from_the_beginning(
    tmp_path: Path, num_damaged: int
) -> None:
    for _ in range(num_damaged):
        damage(run_with_checkpoints(tmp_path, 5) / "checkpoints" / "step-00000005")
    beginning = resume.find(settings(tmp_path, resume="auto"))
    assert (beginning.checkpoint, beginning.step) == ("", 0)
    assert len(beginning.notes) == 1
    assert beginning.notes[0].endswith("training starts from the beginning")


def test_a_run_or_one_of_its_checkpoints_can_be_named(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 5, 10)
    damage(folder / "checkpoints" / "step-00000010")
    assert resume.find(settings(tmp_path, resume=str(folder))).step == 5
    path = folder / "checkpoints" / "step-00000005"
    assert resume.find(settings(tmp_path, resume=str(path))).checkpoint == str(path)
    # As `resume=run.folder` gives it.
    assert resume.find(settings(tmp_path, resume=path)).checkpoint == str(path)


def test_the_best_of_a_run_can_be_named(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 5, 10)
    with pytest.raises(ConfigError, match="this run has no best checkpoint"):
        resume.find(settings(tmp_path, resume=str(folder / "best")))
    best = folder / "checkpoints" / "step-00000005"
    checkpoint_files.point_to_best(folder, best, checkpoint_files.Score(5, "loss", 0.5))
    assert resume.find(settings(tmp_path, resume=str(folder / "best"))).checkpoint == str(best)
    damage(best)
    with pytest.raises(RunError, match=rf"damaged[\s\S]*resume='{re.escape(str(folder))}.*step-00000010'"):
        resume.find(settings(tmp_path, resume=str(folder / "best")))


def test_a_damaged_checkpoint_that_was_named_is_refused_with_a_whole_one_to_take(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 5, 10)
    bad = folder / "checkpoints" / "step-00000010"
    damage(bad)
    with pytest.raises(RunError) as caught:
        resume.find(settings(tmp_path, resume=str(bad)))
    assert "step-00000010" in str(caught.value)
    assert "is damaged (optimizer.safetensors: " in str(caught.value)
    assert f"resume={str(folder / 'checkpoints' / 'step-00000005')!r}" in str(caught.value)


def test_a_path_that_is_not_there_or_holds_no_checkpoint_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    runs_dir = tmp_path / "runs"
    for path, said in ((tmp_path / "gone", "no such folder"), (tmp_path / "empty", "no checkpoint in this")):
        with pytest.raises(ConfigError, match=rf"^resume = '{re.escape(str(path))}': there is {said}"):
            settle(settings(runs_dir, resume=str(path)), [cpu(0)], choose)
    assert not runs_dir.exists()


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 15, channels=(8, 16))
    with pytest.raises(ConfigError) as caught:
        resume.find(settings(tmp_path, resume=str(folder), channels=(8, 32), latent_channels=4, steps=15))
    assert str(caught.value).splitlines()[1:] == [
        "channels is [8, 16] there, and [8, 32] in the settings",
        "latent_channels is 2 there, and 4 in the settings",
        "all 15 steps are done there, and steps is 15: give more, or leave resume out",
    ]


def test_samples_that_were_trained_on_are_not_held_out_later(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 5, data="volumes", seed=3)
    other = {"split_seed": 1, "val_fraction": 0.1, "test_fraction": 0.3, "patient_pattern": "(case_[0-9]+)"}
    with pytest.raises(ConfigError) as caught:
        resume.find(settings(tmp_path, resume=str(folder), data="volumes", **other))
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == [
        "val_fraction",
        "test_fraction",
        "split_seed",
        "patient_pattern",
    ]
    assert "samples that would be held out now were trained on there" in lines[0]
    # Other data are divided by themselves, and another seed of the run changes nothing that is held out.
    assert resume.find(settings(tmp_path, resume=str(folder), data="others", **other)).step == 5
    assert resume.find(settings(tmp_path, resume=str(folder), data="volumes", seed=4)).step == 5
    # Before there was a split_seed, the seed of the run decided.
    config = settings(tmp_path, seed=3)
    known = config.model_dump(mode="json", exclude={"split_seed"})
    old = runs.create(SettledConfig(config), ClusterConfig())
    checkpoint.save(old, 5, TENSORS, {"config": known})
    with pytest.raises(ConfigError, match="split_seed is 3 there, and 0 in the settings"):
        resume.find(settings(tmp_path, resume=str(old)))
    assert resume.find(settings(tmp_path, resume=str(old), split_seed=3)).step == 5


def test_other_settings_are_said(tmp_path: Path) -> None:
    folder = run_with_checkpoints(tmp_path, 5, lr=1e-3)
    changed = settings(tmp_path, resume=str(folder), lr=1e-4, seed=3, val_every=7)
    assert resume.find(changed).notes[1:] == (
        "goes on with other settings: seed was 0, is 3; lr was 0.001, is 0.0001",
    )


def test_settings_that_an_older_version_did_not_know_are_not_said_to_differ(tmp_path: Path) -> None:
    config = settings(tmp_path)
    known = config.model_dump(mode="json", exclude={"ema_decay", "seed"})
    checkpoint.save(runs.create(SettledConfig(config), ClusterConfig()), 5, TENSORS, {"config": known})
    notes = resume.find(settings(tmp_path, resume="auto", seed=3)).notes
    assert notes[1:] == ("goes on with other settings: seed was 0, is 3",)


def test_a_runs_folder_keeps_where_the_run_began(tmp_path: Path) -> None:
    first = run_with_checkpoints(tmp_path, 5)
    second = runs.create(settle(settings(tmp_path, resume="auto"), [cpu(0)], choose), ClusterConfig())
    beginning = resume.Beginning.read(second)
    assert beginning.checkpoint == str(first / "checkpoints" / "step-00000005")
    assert beginning.step == 5
    assert resume.Beginning.read(first) == resume.Beginning()


def test_a_run_may_have_a_name(tmp_path: Path) -> None:
    folder = runs.create(SettledConfig(settings(tmp_path, run_name="with-ema")), ClusterConfig())
    assert re.fullmatch(r"\d{8}-\d{6}-with-ema-[0-9a-f]{4}", folder.name)
    with pytest.raises(ConfigError, match=r"run_name = '\.\./elsewhere' is not valid"):
        settings(tmp_path, run_name="../elsewhere")


def test_auto_with_a_name_goes_on_with_the_runs_of_that_name(tmp_path: Path) -> None:
    named = run_with_checkpoints(tmp_path, 5, run_name="with-ema")
    run_with_checkpoints(tmp_path, 6, run_name="without")
    run_with_checkpoints(tmp_path, 7)
    beginning = resume.find(settings(tmp_path, resume="auto", run_name="with-ema"))
    assert beginning.checkpoint == str(named / "checkpoints" / "step-00000005")
    assert resume.find(settings(tmp_path, resume="auto")).step == 7
    first = resume.find(settings(tmp_path, resume="auto", run_name="third"))
    assert first.notes == (
        f"resume='auto' found no checkpoint of autoencoder named 'third' in {tmp_path}: training starts from the beginning",
    )
