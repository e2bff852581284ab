"""Builds the recipe that a run's settings name.

By name, because recipes are built on the engine and not the other way round.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from nbgpu.config import TRAIN_CONFIGS, OwnConfig, TrainConfig
from nbgpu.engine.workload.recipe import Recipe
from nbgpu.run_folder import folder as runs


def load(config: TrainConfig, run_folder: Path | None = None) -> Recipe:
    """The recipe that the settings name, built with them.

    Args:
        config: the settings.
        run_folder: of the run that it is for. It keeps a recipe of one's own as it was when the run began.
    """
    if isinstance(config, OwnConfig):
        original = Path(config.recipe)
        if run_folder is not None:
            for path in (run_folder, run_folder / original.name):
                runs.require_own(path)
        own: Recipe = _class(config)(config, original if run_folder is None else run_folder / original.name)
        return own
    recipe: Recipe = _class(config)(config)
    return recipe


def import_code(recipe: str) -> None:
    """Imports what the recipe's name, or the path of one's own, stands for, and all that it needs."""
    _class(TRAIN_CONFIGS.get(recipe, OwnConfig))


def _class(config: TrainConfig | type[TrainConfig]) -> Any:
    module_name, class_name = config.IMPLEMENTATION.split(":")
    return getattr(import_module(module_name), class_name)
