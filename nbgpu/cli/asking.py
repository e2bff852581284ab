"""Arguments that several commands have: the recipe, files of settings, and flags that are read before the
others because they determine the others' defaults."""

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
    """Return the recipe that the first argument names: an installed one, or a file, also without its .py;
    None if it names none."""
    name = arguments[0] if arguments else ""
    if name in TRAIN_CONFIGS or own_file.is_file(name):
        return name
    file = f"{name}.py"
    return file if name and not name.startswith("-") and Path(file).is_file() else None


def general_help(
    command: str, arguments: Sequence[str], models: Sequence[type[BaseModel]], **more: Any
) -> None:
    """If the first argument asks for help, print the help of a command without a recipe or run, and exit.

    Args:
        command: the name of the command.
        arguments: the arguments after the name.
        models: the settings that do not depend on a recipe or run.
        more: further arguments of `flags.parse`.
    """
    if flags_help.wanted(arguments[:1]):
        entry = COMMANDS[command]
        flags.parse(
            models,
            arguments,
            prog=f"nbgpu {entry.usage}",
            description=entry.sentence,
            examples=entry.examples,
            **more,
        )


def added_settings(recipe: str) -> list[str]:
    """Return the settings that a recipe in a user's file adds, for the short help; empty for other
    recipes."""
    if recipe in TRAIN_CONFIGS:
        return []
    return [name for name in settings_of(recipe).model_fields if name not in TrainConfig.model_fields]


def no_recipe(arguments: Sequence[str], usage: str) -> UsageError:
    """Return the error for a command line without a recipe at its beginning."""
    hint = ""
    if arguments and not arguments[0].startswith("-"):
        hint = f"{arguments[0]!r} is not a recipe.{did_you_mean(arguments[0], TRAIN_CONFIGS)} "
    return UsageError(f"{hint}usage: {usage}. Recipes: {', '.join(TRAIN_CONFIGS)}")


def take_value(arguments: list[str], flag: str, what: str) -> tuple[list[str], str | None]:
    """Return the arguments without `flag VALUE`, and the value; None if the flag is not given.

    Args:
        arguments: the arguments.
        flag: the flag, such as '--resume'.
        what: the kind of value, for the message if it is missing.
    """
    if flag not in arguments:
        return arguments, None
    index = arguments.index(flag)
    if index + 1 == len(arguments):
        raise UsageError(f"{flag} needs {what}")
    return arguments[:index] + arguments[index + 2 :], arguments[index + 1]


def asked_before(recipe: str, arguments: Sequence[str]) -> tuple[ClusterConfig, dict[str, Any]]:
    """Return the settings of the cluster and of the training from the flags `--config` and `--preset`, which
    are read before all others because they determine the others' defaults."""
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
    """Return the settings of the cluster: those of `asked_before`, overridden by the given flags. All others
    have their defaults.

    Args:
        before: the settings of the cluster from `asked_before`.
        arguments: the arguments.
        values: the parsed values of the cluster's flags, also of those that are not given.

    Raises:
        ConfigError: a value is not valid.
    """
    given = flags.given(arguments, values)
    return ClusterConfig.checked(**{**before.given, **{name: values[name] for name in given}})


def defaults_of(recipe: str, before: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of the training's flags. They depend on the settings of the training from
    `asked_before`, and on the given flags that decide about conditional defaults."""
    given = {name: flags.values_of(arguments, name) for name in deciding(settings_of(recipe))}
    last = {name: values[-1] for name, values in given.items() if values and values[-1]}
    return settings_beside(recipe, {**before, **last})


def _from_file(arguments: Sequence[str], recipe: str) -> tuple[ClusterConfig, TrainConfig] | None:
    """Return the settings in the file of `--config`; None without that flag. For a file of another tool,
    notes on its conversion are printed."""
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
    """Return the file that a flag names; None if the flag is not given. The other flags are not parsed
    yet."""
    files, flag = flags.values_of(arguments, name), f"--{name.replace('_', '-')}"
    if None in files:
        raise ConfigError(
            f"{flag} needs a file, such as {'run.toml' if name == 'config' else 'environment.json'}"
        )
    if len(files) > 1:
        raise ConfigError(f"{flag} is given {len(files)} times. Give one file, and other values as flags")
    return Path(str(files[0])) if files else None
