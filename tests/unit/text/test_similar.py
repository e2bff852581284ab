"""'Did you mean batch_size?', at every door that takes settings by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nbgpu
from nbgpu.config import read_toml, train_config
from nbgpu.errors import ConfigError
from nbgpu.planning import studies, trials
from nbgpu.text.similar import did_you_mean

KNOWN = ("batch_size", "global_batch_size", "steps", "epochs", "lr", "lr_scaling")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("bacth_size", " Did you mean batch_size?"),
        ("batchsize", " Did you mean batch_size?"),
        ("Batch-Size", " Did you mean batch_size?"),
        ("epoch", " Did you mean epochs?"),
        ("step", " Did you mean steps?"),
        ("learning_rate", ""),
        ("x", ""),
        ("", ""),
    ],
)
def test_only_names_that_are_like_it_are_proposed(typed: str, expected: str) -> None:
    assert did_you_mean(typed, KNOWN) == expected


def _from_a_file(folder: Path) -> None:
    file = folder / "run.toml"
    file.write_text('[train]\nrecipe = "autoencoder"\nbacth_size = 4\n')
    read_toml(file)


DOORS: dict[str, Callable[[Path], Any]] = {
    "train": lambda _: nbgpu.Cluster(gpus="none").train("autoencoder", bacth_size=4),
    "plan": lambda _: nbgpu.Cluster(gpus="none").plan("autoencoder", bacth_size=4),
    "find_batch_size": lambda _: nbgpu.Cluster(gpus="none").find_batch_size("autoencoder", bacth_size=4),
    "sweep": lambda _: trials.plan("autoencoder", {"bacth_size": [1, 2]}),
    "study": lambda _: studies.plan("autoencoder", "bucket_mb", [1, 5], {"bacth_size": 2}),
    "what a study varies": lambda _: studies.plan("autoencoder", "bacth_size", [1, 5], {}),
    "run.toml": _from_a_file,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_what_was_meant(door: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"bacth_size is not a setting .*Did you mean batch_size\? Settings: "
    ):
        DOORS[door](tmp_path)


def test_the_settings_of_a_cluster_recipes_and_presets() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean backend\?"):
        nbgpu.Cluster(gpus="none", backnd="gloo")
    with pytest.raises(ConfigError, match=r"'autoencodr' is not known. Did you mean autoencoder\? Recipes: "):
        train_config("autoencodr")
    with pytest.raises(ConfigError, match=r"'demos' is not known. Did you mean demo\? Presets of "):
        train_config("autoencoder", preset="demos")
