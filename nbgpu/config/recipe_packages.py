"""The recipes by name: each is a package with a module `config`, with its settings, and a folder `presets`.

Those of nbgpu are the folders in `nbgpu/recipes`. Another package brings one by an entry point in its
pyproject.toml, whose name is the recipe's and whose value is the package:

    [project.entry-points."nbgpu.recipes"]
    segmentation = "my_package.segmentation"

The package itself and its module `config` import no torch, because the notebook's kernel and the command line
read the settings. The settings name the class that the ranks import (`TrainConfig.IMPLEMENTATION`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE

GROUP = "nbgpu.recipes"


@cache
def _own_packages() -> Mapping[str, str]:
    folders = sorted(path.parent.name for path in (PACKAGE / "recipes").glob("*/config.py"))
    return {name: f"nbgpu.recipes.{name}" for name in folders}


@cache
def packages() -> Mapping[str, str]:
    """The package of each recipe, by the recipe's name. A name of nbgpu's own cannot be taken by another."""
    others = {entry.name: entry.value for entry in sorted(entry_points(group=GROUP))}
    return {**_own_packages(), **{name: others[name] for name in others if name not in _own_packages()}}


def _package(name: str) -> str | None:
    # The search for entry points reads a file of every installed package: 50 ms and more.
    return _own_packages().get(name) or packages().get(name)


@cache
def settings_class(name: str) -> type[TrainConfig]:
    """The settings of a recipe.

    Raises:
        KeyError: there is no such recipe.
        ConfigError: its package cannot be imported, or has no such settings.
    """
    package = _package(name)
    if package is None:
        raise KeyError(name)
    try:
        module = import_module(f"{package}.config")
    except Exception as error:
        raise ConfigError(
            f"recipe = {name!r} cannot be used: importing {package}.config fails with {type(error).__name__}: {error}. "
            f"Mend or uninstall the package that brings it"
        ) from error
    for value in vars(module).values():
        # The module imports the classes that it extends.
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, TrainConfig):
            model: type[TrainConfig] = value
            if model.model_fields["recipe"].default == name:
                return model
    raise ConfigError(
        f"recipe = {name!r} cannot be used: {package}.config has no class of settings with recipe={name!r}"
    )


def folder(name: str) -> Path | None:
    """The folder of a recipe's package; None where there is no such recipe, as for a person's own file."""
    if name in _own_packages():
        return PACKAGE / "recipes" / name
    package = _package(name)
    spec = None if package is None else find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


class _Recipes(Mapping[str, type[TrainConfig]]):
    """A mapping that imports the settings of a recipe when they are asked for."""

    def __getitem__(self, name: str) -> type[TrainConfig]:
        return settings_class(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _package(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(packages())

    def __len__(self) -> int:
        return len(packages())


TRAIN_CONFIGS: Mapping[str, type[TrainConfig]] = _Recipes()
"""The settings of every recipe, by the recipe's name. They are imported when they are asked for."""
