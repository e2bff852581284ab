"""Presets: values of a recipe's settings that belong together, such as those of the guides that nbgpu grew
from. Each is a TOML file in the folder of its recipe here, with a description, a source and the table
[train]."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE
from nbgpu.text.similar import did_you_mean

_FOLDER = PACKAGE / "config" / "presets"
"""The folder of this module, with links kept."""


@dataclass(frozen=True)
class Preset:
    """The values of one preset."""

    recipe: str
    name: str
    description: str
    source: str
    """Where the numbers come from."""
    values: Mapping[str, Any]
    """By the names of the settings."""


def names(recipe: str) -> list[str]:
    """The names of a recipe's presets, `demo` first."""
    found = (path.stem for path in (_FOLDER / recipe).glob("*.toml"))
    return sorted(found, key=lambda name: (name != "demo", name))


def read(recipe: str, name: str) -> Preset:
    """Read a preset.

    Raises:
        ConfigError: the recipe has no preset of this name.
    """
    known = names(recipe)
    if name not in known:
        others = f"Presets of {recipe}: {', '.join(known)}" if known else f"{recipe} has no presets"
        raise ConfigError(f"preset = {name!r} is not known.{did_you_mean(str(name), known)} {others}")
    tables = tomllib.loads((_FOLDER / recipe / f"{name}.toml").read_text())
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in tables["train"].items()}
    return Preset(recipe, name, tables["description"], tables["source"], values)
