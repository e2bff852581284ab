"""Settings as text: as a TOML file, which is read back, as a notebook cell and as a shell command."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.own_file import read_text
from nbgpu.config.recipes import settings_beside, settings_of, train_config
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError

_WIDTH = 79
"""The longest call that is written on one line."""


def write_toml(path: Path, cluster: ClusterConfig, train: TrainConfig) -> None:
    """Write the tables [cluster] and [train]. None values are left out, and are read back as None."""
    tables = {
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "train": train.model_dump(mode="json", exclude_none=True),
    }
    path.write_text(tomli_w.dumps(tables))


def read_tables(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise ConfigError if it cannot be read."""
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        missing = f"file {path}" if path.parent.is_dir() else f"folder {path.parent}"
        raise ConfigError(f"there is no {missing}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read as TOML: too many brackets stand in one another") from None


def read_toml(path: Path, **overrides: Any) -> tuple[ClusterConfig, TrainConfig]:
    """Read a file with the tables [cluster] and [train], which `write_toml` or a person has written.

    Args:
        path: the file.
        overrides: settings of the run that replace the file's.

    Raises:
        ConfigError: with the file and a line for every bad value.
    """
    tables = read_tables(path)
    unknown = sorted(set(tables) - {"cluster", "train"})
    if unknown:
        raise ConfigError(
            f"{path} has the unknown table(s) {', '.join(unknown)}. It may have [cluster] and [train]"
        )
    if plain := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise ConfigError(f"{path}: {' and '.join(plain)} must be a table, such as [{plain[0]}]")
    train: Mapping[str, Any] = {"recipe": "autoencoder"} | tables.get("train", {}) | overrides
    if not isinstance(train["recipe"], str):
        raise ConfigError(f"{path}: recipe = {train['recipe']!r} is not a recipe's name")
    try:
        return ClusterConfig.checked(**tables.get("cluster", {})), train_config(**train)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None


def differing(recipe: str, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings that are needed to describe the same run: those that differ from their
    defaults beside the others.

    Args:
        recipe: the recipe.
        preset: the preset whose values replace defaults; '' for none.
        given: the settings that were given, by name.

    Raises:
        ConfigError: the settings are not valid together.
    """
    beside = {"preset": preset} if preset else {}
    whole = train_config(recipe, **beside, **given)
    needed = dict(given)
    for name, value in given.items():
        others = {setting: needed[setting] for setting in needed if setting != name}
        if settings_beside(recipe, {**beside, **others})[name] == value:
            needed = others
    # A given value may also decide about values of the preset and about conditional defaults.
    is_same = train_config(recipe, **beside, **needed).model_dump() == whole.model_dump()
    return needed if is_same else dict(given)


def as_code(
    recipe: str, preset: str, settings: Mapping[str, Any], cluster: ClusterConfig, is_started: bool = False
) -> str:
    """Return the code of a notebook cell that trains with these settings.

    Args:
        recipe: the recipe.
        preset: the preset; '' for none.
        settings: the settings that differ from their defaults, as `differing` returns them.
        cluster: the settings of the cluster.
        is_started: whether the notebook already has the cluster; its start is then only a comment.
    """
    given = {"preset": preset, **settings} if preset else settings
    arguments = [_literal(recipe), *(f"{name}={_literal(value)}" for name, value in given.items())]
    call = f"run = cluster.train({', '.join(arguments)})"
    if len(call) > _WIDTH:
        call = "\n".join(["run = cluster.train(", *(f"    {argument}," for argument in arguments), ")"])
    start = " ".join(
        ["%nbgpu start", *map(shlex.quote, arguments_of(ClusterConfig, cluster.beyond_defaults))]
    )
    begin = [f"# {start}"] if is_started else ["%load_ext nbgpu", start]
    return "\n".join(["import nbgpu", "", *begin, "cluster = nbgpu.current()", call])


def as_command(recipe: str, preset: str, settings: Mapping[str, Any], cluster: ClusterConfig) -> str:
    """Return the shell command that trains with these settings."""
    arguments = ["nbgpu", "train", recipe, *(["--preset", preset] if preset else [])]
    arguments += arguments_of(settings_of(recipe), settings)
    arguments += arguments_of(ClusterConfig, cluster.beyond_defaults)
    return shlex.join(arguments)


def arguments_of(model: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """Return the flags of these settings for a command line."""
    arguments = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool) and model.model_fields[name].annotation is bool:
            arguments.append(flag if value else f"--no-{flag[2:]}")
            continue
        items = [str(item) for item in (value if isinstance(value, tuple) else (value,))]
        if len(items) == 1 and items[0].startswith("-"):
            # As a separate argument it would be taken for a flag.
            arguments.append(f"{flag}={items[0]}")
        else:
            arguments += [flag, *items]
    return arguments


def _literal(value: Any) -> str:
    """Return a value as Python code; texts have double quotes, as in the docs."""
    if isinstance(value, str) and not set(value) & {'"', "\\"} and value.isprintable():
        return f'"{value}"'
    return repr(value)
