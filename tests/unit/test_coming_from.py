"""docs/coming-from.md names commands that there are: each is parsed with its values by its own recipe."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

import nbgpu
from nbgpu.cli import main
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, flags, train_config
from nbgpu.config.characterization import CharacterizeConfig
from nbgpu.config.settings import paths_to_read, unused
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.records import Device
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.settling import SettledConfig

_OF_TRAIN = {"config": True, "environment-file": True, "preset": True, "find-batch-size": False}
"""The flags of `nbgpu train` that are no settings, and whether they take a value."""
_NEEDS_FILES = {
    *("data", "resume", "initial", "pretrained", "perceptual_network", "gram_network"),
    *("fold", "eval_times", "wandb", "tensorboard"),
}
"""Settings with files, or packages, of which the page gives examples only."""
_GPUS = [Device("cuda", "NVIDIA H100", f"GPU-{i}", i, 80 * 2**30, compute_capability=9.0) for i in range(2)]


@dataclass(frozen=True)
class Command:
    """What a row tells people to type."""

    recipe: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its flags and their values."""
        words = shlex.split(self.text)
        return words[3:] if words[:2] == ["nbgpu", "train"] else words

    @property
    def is_mention(self) -> bool:
        """Whether it is a flag alone that takes a value: the row says what it means."""
        words = self.words
        return len(words) == 1 and not _takes_no_value(self.recipe, words[0])


def _takes_no_value(recipe: str, flag: str) -> bool:
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    field = {**ClusterConfig.model_fields, **TRAIN_CONFIGS[recipe].model_fields}.get(name)
    is_switch = field is not None and field.annotation is bool
    return is_switch or flag.removeprefix("--") in _OF_TRAIN


def _commands() -> Iterator[Command]:
    recipe = "autoencoder"
    for line in (REPOSITORY / "docs" / "coming-from.md").read_text().splitlines():
        if found := re.match(r"The recipe is \[(\w+)\]", line):
            recipe = found[1]
        if line.startswith("| "):
            for text in re.findall(r"`([^`]*)`", line.split(" | ")[1]):
                if text.startswith(("--", "nbgpu train ")) and "RECIPE" not in text:
                    yield Command(recipe, text)


COMMANDS = list(dict.fromkeys(_commands()))


def _parsed(command: Command) -> tuple[ClusterConfig, TrainConfig]:
    words = list(command.words)
    preset = next(iter(flags.values_of(words, "preset")), "")
    for flag, takes_value in _OF_TRAIN.items():
        if f"--{flag}" in words:
            place = words.index(f"--{flag}")
            del words[place : place + 1 + takes_value]
    model = TRAIN_CONFIGS[command.recipe]
    values = flags.parse([ClusterConfig, model], words, prog=command.text, hidden=("recipe", *unused(model)))
    of_cluster = {name: values.pop(name) for name in ClusterConfig.model_fields}
    given = {name: values[name] for name in flags.given(words, values)}
    config = train_config(command.recipe, preset=preset, **_with_what_it_needs(command, given))
    return ClusterConfig.checked(**of_cluster), config


def _with_what_it_needs(command: Command, values: dict[str, Any]) -> dict[str, Any]:
    """Add what a row about one setting leaves out."""
    if command.recipe == "survival" and "fold" in values:
        values |= {"data": "cohort.csv"}
    return values


def test_the_page_has_commands_of_every_recipe() -> None:
    assert len(COMMANDS) > 70
    assert {"autoencoder", "diffusion", "survival", "microstructure", "lithography"} <= {
        command.recipe for command in COMMANDS
    }


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.recipe}: {c.text}")
def test_every_command_is_one_of_its_recipe(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.is_mention:
        name = command.words[0].removeprefix("--").replace("-", "_")
        model = TRAIN_CONFIGS[command.recipe]
        assert name in ClusterConfig.model_fields or name in model.model_fields.keys() - unused(model)
        return
    _, config = _parsed(command)
    if command.text.startswith("nbgpu train"):
        assert command.text.split()[2] == command.recipe
    # The files that the row names are not there, and settings whose files are missing are refused.
    monkeypatch.chdir(tmp_path)
    for setting in type(config).model_fields:
        for path in paths_to_read(config, setting):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    adapt_to_devices(config, _GPUS)


def test_every_command_that_measures_is_one() -> None:
    page = (REPOSITORY / "docs" / "coming-from.md").read_text()
    commands = set(re.findall(r"`(nbgpu characterize [^`]*)`", page))
    assert len(commands) > 1
    for command in commands:
        words = shlex.split(command)[2:]
        files = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        assert files
        values = flags.parse([CharacterizeConfig], words[len(files) :], prog=command)
        assert all(
            CharacterizeConfig.checked(**values).recipes_settings(file, {}).data == file for file in files
        )


def test_every_command_that_exports_writes_its_files(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "coming-from.md").read_text()
    commands = re.findall(r"`(nbgpu export [^`]*)`", page)
    assert {flags.values_of(shlex.split(command), "to")[0] for command in commands} == {
        "torchrun",
        "slurm",
        "job",
    }
    config = train_config("autoencoder", data="phantoms", runs_dir=str(tmp_path))
    folder = runs.create(SettledConfig(config), ClusterConfig(gpus="none"))
    written = ""
    for number, command in enumerate(commands):
        words = shlex.split(command.replace("RUN_FOLDER", str(folder)))[1:]
        main([*words, "--out", str(tmp_path / f"out{number}")])
        written += "".join(path.read_text() for path in (tmp_path / f"out{number}").iterdir())
    for asked in ("--gpus-per-node=4", "--mem=128G", "--time=24:00:00", 'nvidia.com/gpu: "2"', "NNODES:=2"):
        assert asked in written


@pytest.mark.long
def test_what_needs_no_files_can_be_planned(cluster2: nbgpu.Cluster) -> None:
    planned = 0
    for command in COMMANDS:
        given = {word.removeprefix("--").replace("-", "_") for word in command.words if word.startswith("--")}
        of_run = given & TRAIN_CONFIGS[command.recipe].model_fields.keys()
        on_gpus_only = {
            "amp",
            "cpu_offload",
            "cudnn",
            "sdpa",
            "compile",
            "transforms_on",
            "global_batch_size",
        }
        if command.is_mention or not of_run or of_run & (_NEEDS_FILES | on_gpus_only):
            continue
        _, config = _parsed(command)
        values = {name: getattr(config, name) for name in of_run}
        plan = cluster2.plan(command.recipe, **values)
        assert "unknown" not in plan.memory, (command, plan.memory)
        planned += 1
    assert planned > 15
