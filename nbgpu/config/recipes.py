"""The settings of each recipe: of nbgpu's, of other packages', and of those in a person's own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from nbgpu.config import own_file, presets
from nbgpu.config.conditions import conditions, field_defaults, in_place_of_defaults
from nbgpu.config.own_file import RecipeFile
from nbgpu.config.recipe_packages import TRAIN_CONFIGS
from nbgpu.config.settings import control, typed_value
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean

RECIPE_GROUP = "Recipe"
"""The control panel's heading for the settings of a recipe in the user's file."""

_REPLACED_BY_METHOD: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer", "momentum"),
    "schedule": (
        *("schedule", "warmup_steps", "warmup_epochs", "min_lr"),
        *("lr_decay", "lr_decay_every", "plateau_patience"),
    ),
}
"""By method of the recipe, the settings that have no effect if the recipe has the method."""


class OwnConfig(TrainConfig):
    """The settings that every recipe in a user's file has; `build_settings_class` adds those of the file."""

    IMPLEMENTATION = "nbgpu.recipes.own:Own"
    VALIDATION_VALUES = ()
    PREDICTS = "what the recipe's `predict` returns and writes"
    UNUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("data", "dataset", "check_voxels", "cache_rate", "replace_rate", "cache_threads", "cache_dir"),
            *("transforms_on", "rotate90_prob", "flip_prob", "intensity_prob", "intensity_strength"),
        ),
        "the dataset is the recipe's own, which decides what is read, kept and changed",
    ) | dict.fromkeys(
        ("test_fraction", "split"),
        "its result is about what it reads for that; val_dataset holds samples out",
    )
    CLASS_NAME: ClassVar[str] = ""
    """The name of the recipe's class in the file."""
    OWN: ClassVar[tuple[str, ...]] = ()
    """The names of the file's settings."""

    METHODS: ClassVar[frozenset[str]] = frozenset()
    """The methods of the recipe's class in the file."""
    WHY_LOSSES_DIFFER: ClassVar[str] = ""
    """The attribute `why_losses_differ` of the recipe's class in the file."""

    dataset: Literal["plain"] = Field("plain", description="samples are read each time that they are used")

    @property
    def why_losses_differ(self) -> str:
        return self.WHY_LOSSES_DIFFER

    def problems(self) -> Iterator[str]:
        """Yield settings that do not go with the recipe's methods."""
        if "optimizer" in self.METHODS and self.strategy == "fsdp":
            yield (
                f"strategy='fsdp' does not go with the method `optimizer` of {self.recipe}: nbgpu shares out the state of its own "
                "optimizers only. Take 'ddp', or leave the method out; `parameter_groups` goes with fsdp"
            )


def build_settings_class(file: RecipeFile) -> type[TrainConfig]:
    """Return the class of settings for a recipe in a user's file: nbgpu's settings and the file's.

    Raises:
        ConfigError: a setting of the file has no valid type or default.
    """
    fields: dict[str, Any] = {"recipe": (str, Field(str(file.path), description="the recipe file"))}
    for setting in file.settings:
        inherited = OwnConfig.model_fields.get(setting.name)
        if inherited is None:
            extra = control(RECIPE_GROUP)
            field = Field(setting.default, description=setting.description, json_schema_extra=extra)
            fields[setting.name] = (setting.annotation, field)
        else:
            # The file gives one of nbgpu's settings another default.
            field = FieldInfo.merge_field_infos(inherited, default=setting.default)
            fields[setting.name] = (inherited.annotation, field)
    try:
        model = create_model(f"{file.class_name}Config", __base__=OwnConfig, __doc__=file.summary, **fields)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{file.path}: {error}") from None
    model.CLASS_NAME = file.class_name
    model.METHODS = file.methods
    model.WHY_LOSSES_DIFFER = file.why_losses_differ
    replaced = {
        name: f"its method `{method}` decides"
        for method, names in _REPLACED_BY_METHOD.items()
        if method in file.methods
        for name in names
    }
    model.UNUSED = {**OwnConfig.UNUSED, **replaced}
    model.OWN = tuple(setting.name for setting in file.settings)
    return model


def settings_of(recipe: str) -> type[TrainConfig]:
    """Return the class of a recipe's settings: by name for a recipe of nbgpu or of another package, or
    by its file, 'my_recipe.py', for the user's own.

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
    """Return the checked settings of a recipe.

    Args:
        recipe: the recipe's name, or the user's file.
        values: the settings that are given, and optionally `preset`, the name of a preset whose values
            replace defaults.

    Raises:
        ConfigError: the name of the recipe or of the preset is not known, or a value is not valid.
    """
    model = settings_of(recipe)
    return model.checked(recipe=model.model_fields["recipe"].default, **with_preset(recipe, values))


def with_preset(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings with `preset`, if it is among them, replaced by the preset's values.

    Values of the preset that would take the effect from a given setting are left out.

    Raises:
        ConfigError: the recipe has no such preset.
    """
    model = settings_of(recipe)
    if "preset" not in given or "preset" in model.model_fields:
        return dict(given)
    values = {name: value for name, value in given.items() if name != "preset"}
    if not given["preset"]:
        return values
    preset = presets.read(recipe, given["preset"]).values
    typed = {name: typed_value(model, name, value) for name, value in values.items()}
    replaced = in_place_of_defaults(model, typed, preset)
    return {name: value for name, value in {**replaced, **values}.items() if name in {*preset, *values}}


def settings_beside(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every setting of a recipe, unchecked. A setting that is not given has the value of
    the given `preset`, else its conditional default, else the field's default.

    Raises:
        ConfigError: the recipe has no such preset.
    """
    model = settings_of(recipe)
    values = {name: typed_value(model, name, value) for name, value in with_preset(recipe, given).items()}
    return {**field_defaults(model), **in_place_of_defaults(model, values), **values}


def config_of_point(recipe: str, shared: Mapping[str, Any], varied: Mapping[str, Any]) -> TrainConfig:
    """Return the checked settings of one point of a sweep or study.

    A shared setting that has no effect beside the varied values keeps its default: a momentum that is given
    for runs with SGD and with AdamW is used only by those with SGD.

    Args:
        recipe: the recipe.
        shared: the given settings that all points have.
        varied: the settings of this point.

    Raises:
        ConfigError: the recipe is not known, or a value is not valid.
    """
    model = settings_of(recipe)
    counting = {
        name: value
        for name, value in shared.items()
        if all(
            condition.holds(typed_value(model, condition.name, varied[condition.name]))
            for condition in conditions(model, name)
            if condition.name in varied
        )
    }
    return train_config(recipe, **{**counting, **varied})
