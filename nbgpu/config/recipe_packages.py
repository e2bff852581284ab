"""The recipes by name. A recipe is a package with a module `config`, which has its settings, and a folder
`presets`.

nbgpu's recipes are the folders in `nbgpu/recipes`. Another package adds a recipe by an entry point in its
pyproject.toml, whose name is the recipe's name and whose value is the recipe's package:

    [project.entry-points."nbgpu.recipes"]
    segmentation = "my_package.segmentation"

The package itself and its module `config` must not import torch, because the notebook's kernel and the
command line import them. The settings name the class that the ranks import (`TrainConfig.IMPLEMENTATION`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
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
def _builtin_packages() -> Mapping[str, str]:
    folders = sorted(path.parent.name for path in (PACKAGE / "recipes").glob("*/config.py"))
    return {name: f"nbgpu.recipes.{name}" for name in folders}


@cache
def packages() -> Mapping[str, str]:
    """Return the package of each recipe, by the recipe's name. Other packages cannot replace nbgpu's
    recipes."""
    others = {entry.name: entry.value for entry in sorted(entry_points(group=GROUP))}
    # The first mapping gives the order, and the last one wins.
    return {**_builtin_packages(), **others, **_builtin_packages()}


def _package(name: str) -> str | None:
    """Return the package of a recipe; None for an unknown name."""
    # nbgpu's recipes come first, because to find entry points takes 50 ms or more: it reads a file of every
    # installed package.
    return _builtin_packages().get(name) or packages().get(name)


@cache
def settings_class(name: str) -> type[TrainConfig]:
    """Return the class of a recipe's settings.

    Raises:
        KeyError: there is no such recipe.
        ConfigError: the recipe's package cannot be imported, or has no class of settings for it.
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
        # The module of a class is compared, because the module also has the classes that it imports.
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, TrainConfig):
            model: type[TrainConfig] = value
            if model.model_fields["recipe"].default == name:
                return model
    raise ConfigError(
        f"recipe = {name!r} cannot be used: {package}.config has no class of settings with recipe={name!r}"
    )


def folder(name: str) -> Path | None:
    """Return the folder of a recipe's package; None for an unknown name, such as a user's file."""
    if name in _builtin_packages():
        return PACKAGE / "recipes" / name
    package, spec = _package(name), None
    if package is not None:
        with suppress(ImportError):  # such as of a package above it
            spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


class _Recipes(Mapping[str, type[TrainConfig]]):
    """A mapping that imports the settings of a recipe on access."""

    def __getitem__(self, name: str) -> type[TrainConfig]:
        return settings_class(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _package(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(packages())

    def __len__(self) -> int:
        return len(packages())


TRAIN_CONFIGS: Mapping[str, type[TrainConfig]] = _Recipes()
"""The class of settings of every recipe, by the recipe's name, imported on access."""
