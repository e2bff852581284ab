"""Presets: named sets of values of a recipe's settings, such as those of a published guide. A preset is a
TOML file in the folder `presets` of its recipe, with a description, a source and the table [train]."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbgpu.config import recipe_packages
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean


@dataclass(frozen=True)
class Preset:
    """The values of one preset."""

    recipe: str
    name: str
    description: str
    source: str
    """The guide or paper that the numbers come from."""
    values: Mapping[str, Any]
    """The values, by the names of the settings."""


def names(recipe: str) -> list[str]:
    """Return the names of a recipe's presets, `demo` first."""
    folder = recipe_packages.folder(recipe)
    stems = [] if folder is None else [path.stem for path in (folder / "presets").glob("*.toml")]
    return sorted(stems, key=lambda name: (name != "demo", name))


def read(recipe: str, name: str) -> Preset:
    """Read a preset.

    Raises:
        ConfigError: the recipe has no preset of this name.
    """
    folder = recipe_packages.folder(recipe)
    all_names = names(recipe)
    if folder is None or name not in all_names:
        others = f"Presets of {recipe}: {', '.join(all_names)}" if all_names else f"{recipe} has no presets"
        raise ConfigError(f"preset = {name!r} is not known.{did_you_mean(str(name), all_names)} {others}")
    # Settings with several values are tuples, and TOML has only lists.
    tables = tomllib.loads((folder / "presets" / f"{name}.toml").read_text())
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in tables["train"].items()}
    return Preset(recipe, name, tables["description"], tables["source"], values)
