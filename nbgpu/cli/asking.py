"""Arguments that several commands have: recipes, files of settings, and flags that are read before the
others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nbgpu.cli.catalogue import COMMANDS, UsageError
from nbgpu.config import (
    TRAIN_CONFIGS,
    ClusterConfig,
    TrainConfig,
    flags,
    flags_help,
    own_file,
    read_toml,
    settings_beside,
    settings_of,
)
from nbgpu.config.conditions import deciding
from nbgpu.conversion import convert
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean


def recipe_of(arguments: Sequence[str]) -> str | None:
    """The recipe that the first argument names: a built-in one or a file, also without its .py."""
    name = arguments[0] if arguments else ""
    if name in TRAIN_CONFIGS or own_file.is_file(name):
        return name
    beside = f"{name}.py"
    return beside if name and not name.startswith("-") and Path(beside).is_file() else None


def general_help(
    command: str, arguments: Sequence[str], models: Sequence[type[BaseModel]], **more: Any
) -> None:
    """Print the help of a command that names no recipe or run yet, where that is asked for, and exit.

    Args:
        command: its name.
        arguments: what follows the name.
        models: the settings that there are whatever is named.
        more: further arguments of `flags.parse`.
    """
    if flags_help.wanted(arguments[:1]):
        about = COMMANDS[command]
        flags.parse(
            models,
            arguments,
            prog=f"nbgpu {about.usage}",
            description=about.sentence,
            examples=about.examples,
            **more,
        )


def added_settings(recipe: str) -> list[str]:
    """The settings that a recipe in a file of the person adds, which matter most to them."""
    if recipe in TRAIN_CONFIGS:
        return []
    return [name for name in settings_of(recipe).model_fields if name not in TrainConfig.model_fields]


def no_recipe(arguments: Sequence[str], usage: str) -> UsageError:
    """Return the error for a command line without a recipe at its beginning."""
    named = ""
    if arguments and not arguments[0].startswith("-"):
        named = f"{arguments[0]!r} is not a recipe.{did_you_mean(arguments[0], TRAIN_CONFIGS)} "
    return UsageError(f"{named}usage: {usage}. Recipes: {', '.join(TRAIN_CONFIGS)}")


def take_value(arguments: list[str], flag: str, what: str) -> tuple[list[str], str | None]:
    """Take `flag VALUE` out of the arguments."""
    if flag not in arguments:
        return arguments, None
    place = arguments.index(flag)
    if place + 1 == len(arguments):
        raise UsageError(f"{flag} needs {what}")
    return arguments[:place] + arguments[place + 2 :], arguments[place + 1]


def asked_before(recipe: str, arguments: Sequence[str]) -> tuple[ClusterConfig, dict[str, Any]]:
    """Return the settings of the cluster and of the training that `--config` and `--preset` give. These two
    flags are read before all others, whose defaults they determine."""
    presets = flags.values_of(arguments, "preset")
    if None in presets or len(presets) > 1:
        raise ConfigError("--preset needs one name, such as demo; `nbgpu recipes` lists them")
    before: dict[str, Any] = {"preset": presets[0]} if presets else {}
    from_file = _from_file(arguments, recipe)
    if from_file is None:
        return ClusterConfig.checked(), before
    cluster, train = from_file
    return cluster, before | {name: value for name, value in train.given.items() if name != "recipe"}


def cluster_of(before: ClusterConfig, arguments: Sequence[str], values: Mapping[str, Any]) -> ClusterConfig:
    """Return the settings of the cluster: those of `asked_before`, overridden by the given flags. Settings
    that are in neither have the site's default, or their own.

    Raises:
        ConfigError: a value is not valid.
    """
    given = flags.given(arguments, values)
    return ClusterConfig.checked(**{**before.given, **{name: values[name] for name in given}})


def defaults_of(recipe: str, before: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of the training's flags. They depend on what `asked_before` returned, and on those
    flags that decide about the defaults of others."""
    decide = {name: flags.values_of(arguments, name) for name in deciding(settings_of(recipe))}
    return settings_beside(
        recipe, {**before, **{name: values[-1] for name, values in decide.items() if values and values[-1]}}
    )


def _from_file(arguments: Sequence[str], recipe: str) -> tuple[ClusterConfig, TrainConfig] | None:
    """The settings in the file of `--config`, which are the defaults of the other flags; None without that
    flag. What a file of another tool has beside them is printed."""
    file, environment = _file(arguments, "config"), _file(arguments, "environment_file")
    if environment and not (file and convert.is_foreign(file)):
        raise ConfigError(
            "--environment-file is the environment.json of MONAI's tutorial 3d_ldm, and belongs to its --config config.json"
        )
    if file is None:
        return None
    if not convert.is_foreign(file):
        return read_toml(file, recipe=recipe)
    data, network = (
        next(iter(flags.values_of(arguments, name)), None) or "" for name in ("data", "perceptual_network")
    )
    converted = convert.convert([file, *([environment] if environment else [])], data, network)
    if converted.recipe != recipe:
        raise ConfigError(
            f"{file} is for the recipe {converted.recipe}: nbgpu train {converted.recipe} --config {file}"
        )
    print("\n".join(converted.notes()), file=sys.stderr)
    return ClusterConfig.checked(), converted.config()


def _file(arguments: Sequence[str], name: str) -> Path | None:
    """Return the file that a flag names, before the flags are parsed as a whole."""
    files, flag = flags.values_of(arguments, name), f"--{name.replace('_', '-')}"
    if None in files:
        raise ConfigError(
            f"{flag} needs a file, such as {'run.toml' if name == 'config' else 'environment.json'}"
        )
    if len(files) > 1:
        raise ConfigError(f"{flag} is given {len(files)} times. Give one file, and other values as flags")
    return Path(str(files[0])) if files else None
