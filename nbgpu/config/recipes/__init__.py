"""The settings of each recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbgpu.config import own_file
from nbgpu.config.recipes.autoencoder import AutoencoderConfig
from nbgpu.config.recipes.diffusion import DiffusionConfig
from nbgpu.config.recipes.lithography import LithographyConfig
from nbgpu.config.recipes.microstructure import MicrostructureConfig
from nbgpu.config.recipes.own import settings_in
from nbgpu.config.recipes.survival import SurvivalConfig
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError

TRAIN_CONFIGS: dict[str, type[TrainConfig]] = {
    "autoencoder": AutoencoderConfig,
    "diffusion": DiffusionConfig,
    "lithography": LithographyConfig,
    "microstructure": MicrostructureConfig,
    "survival": SurvivalConfig,
}
"""The settings of every recipe, by the recipe's name."""


def settings_of(recipe: str) -> type[TrainConfig]:
    """The model of a recipe's settings: by its name for one of nbgpu's, or by its file, 'my_recipe.py', for
    the user's own.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be used.
    """
    if own_file.is_file(recipe):
        return settings_in(own_file.read(Path(recipe).absolute()))
    if recipe not in TRAIN_CONFIGS:
        known = ", ".join(sorted(TRAIN_CONFIGS))
        raise ConfigError(
            f"recipe = {recipe!r} is not known. Recipes: {known}, or a file of your own: my_recipe.py"
        )
    return TRAIN_CONFIGS[recipe]


def train_config(recipe: str, **values: Any) -> TrainConfig:
    """The checked settings of one recipe; ConfigError where the name or a value is wrong."""
    model = settings_of(recipe)
    return model.checked(recipe=model.model_fields["recipe"].default, **values)
