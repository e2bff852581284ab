"""Builds the recipe that a run's settings name.

Recipes are found by name, because recipes import the engine and not the other way round.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast

from nbgpu.config import TRAIN_CONFIGS, OwnConfig, TrainConfig
from nbgpu.engine.workload.recipe import Recipe
from nbgpu.errors import ConfigError
from nbgpu.run_folder import folder as runs


def load(config: TrainConfig, run_folder: Path | None = None, complete: bool = True) -> Recipe:
    """Build the recipe that the settings name.

    Args:
        config: the settings.
        run_folder: the folder of the run, which has a copy of a person's own recipe from the beginning of the
            run; None to take the original file.
        complete: whether settings that are left to the data are refused; False for a recipe that proposes
            them.

    Raises:
        ConfigError: some settings are left to the data and were not chosen.
    """
    if complete and config.left_to_data:
        names = ", ".join(config.left_to_data)
        raise ConfigError(
            f"{names}: left out, and chosen only where a cluster or torchrun starts a run. Give them here"
        )
    if isinstance(config, OwnConfig):
        original = Path(config.recipe)
        if run_folder is not None:
            # The copy is code that is about to run, so it must belong to this user.
            for path in (run_folder, run_folder / original.name):
                runs.require_own(path)
        file = original if run_folder is None else run_folder / original.name
        return cast(Recipe, _class(config)(config, file))
    return cast(Recipe, _class(config)(config))


def import_code(recipe: str) -> None:
    """Import the module of a recipe, given by its name or by the path of the person's own file."""
    _class(TRAIN_CONFIGS.get(recipe, OwnConfig))


def _class(config: TrainConfig | type[TrainConfig]) -> Any:
    module_name, class_name = config.IMPLEMENTATION.split(":")
    return getattr(import_module(module_name), class_name)
