"""The settings of each recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbgpu.config import own_file, presets
from nbgpu.config.conditions import conditions, in_place_of_defaults
from nbgpu.config.own_config import build_settings_class
from nbgpu.config.recipe_packages import TRAIN_CONFIGS
from nbgpu.config.settings import from_text
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean


def settings_of(recipe: str) -> type[TrainConfig]:
    """The model of a recipe's settings: by its name for one of nbgpu's, or by its file, 'my_recipe.py', for
    the user's own.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be used.
    """
    if own_file.is_file(recipe):
        return build_settings_class(own_file.read(Path(recipe).absolute()))
    if recipe not in TRAIN_CONFIGS:
        names = ", ".join(sorted(TRAIN_CONFIGS))
        raise ConfigError(
            f"recipe = {recipe!r} is not known.{did_you_mean(recipe, TRAIN_CONFIGS)} Recipes: {names}, or a file of "
            "your own: my_recipe.py"
        )
    return TRAIN_CONFIGS[recipe]


def train_config(recipe: str, **values: Any) -> TrainConfig:
    """The checked settings of one recipe.

    Args:
        recipe: its name, or the file of the user's own.
        values: the settings that are given; and `preset`, the name of values that take the place of defaults.

    Raises:
        ConfigError: the name of the recipe, or of the preset, or a value is wrong.
    """
    model = settings_of(recipe)
    return model.checked(recipe=model.model_fields["recipe"].default, **with_preset(recipe, values))


def with_preset(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings with the values of `preset`, if that is among them, in place of its name.

    It leaves out values that would make a given setting not count.

    Raises:
        ConfigError: the recipe has no such preset.
    """
    model = settings_of(recipe)
    if "preset" not in given or "preset" in model.model_fields:
        return dict(given)
    values = {name: _typed(model, name, value) for name, value in given.items() if name != "preset"}
    if not given["preset"]:
        return {name: value for name, value in given.items() if name != "preset"}
    preset = presets.read(recipe, given["preset"]).values
    replaced = in_place_of_defaults(model, values, preset)
    return {name: value for name, value in {**replaced, **given}.items() if name in {*preset, *values}}


def settings_beside(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every setting of a recipe, with its default where it is not given: that of the `preset`
    among the given ones, that beside other settings, or the field's own. Nothing is checked.

    Raises:
        ConfigError: the recipe has no such preset.
    """
    model = settings_of(recipe)
    values = {name: _typed(model, name, value) for name, value in with_preset(recipe, given).items()}
    field_defaults = {name: field.default for name, field in model.model_fields.items()}
    return {**field_defaults, **in_place_of_defaults(model, values), **values}


def config_of_point(recipe: str, shared: Mapping[str, Any], varied: Mapping[str, Any]) -> TrainConfig:
    """The checked settings of one run of several that differ in the settings `varied`.

    A shared setting that does not count beside what varies is left at its default: a momentum that is given
    for runs with SGD and with AdamW is for those with SGD.

    Raises:
        ConfigError: the name of the recipe or a value is wrong.
    """
    model = settings_of(recipe)
    counting = {
        name: value
        for name, value in shared.items()
        if all(
            condition.holds(_typed(model, condition.name, varied[condition.name]))
            for condition in conditions(model, name)
            if condition.name in varied
        )
    }
    return train_config(recipe, **{**counting, **varied})


def _typed(model: type[TrainConfig], name: str, value: Any) -> Any:
    """A value that may come as text, from a command line. One that cannot be read stays as it is, and is
    refused with the others that are wrong."""
    try:
        return (
            from_text(model, name, value) if isinstance(value, str) and name in model.model_fields else value
        )
    except ConfigError:
        return value
