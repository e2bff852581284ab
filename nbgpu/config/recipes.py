"""The settings of each recipe: of nbgpu's, of other packages', and of those in a person's own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from nbgpu.config import own_file, presets
from nbgpu.config.conditions import conditions, in_place_of_defaults
from nbgpu.config.own_file import RecipeFile
from nbgpu.config.recipe_packages import TRAIN_CONFIGS
from nbgpu.config.settings import control, typed_value
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean

RECIPE_GROUP = "Recipe"
"""The heading in the control panel of the settings of a recipe in the user's own file."""


_REPLACED: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer", "momentum"),
    "schedule": (
        *("schedule", "warmup_steps", "warmup_epochs", "min_lr"),
        *("lr_decay", "lr_decay_every", "plateau_patience"),
    ),
}
"""The settings that have no effect beside a method of the recipe."""


class OwnConfig(TrainConfig):
    """What every recipe in a file of one's own has; `settings_of` adds those of the file."""

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
        """Yield what nbgpu cannot do with methods of the recipe."""
        if "optimizer" in self.METHODS and self.strategy == "fsdp":
            yield (
                f"strategy='fsdp' does not go with the method `optimizer` of {self.recipe}: nbgpu shares out the state of its own "
                "optimizers only. Take 'ddp', or leave the method out; `parameter_groups` goes with fsdp"
            )


def build_settings_class(file: RecipeFile) -> type[TrainConfig]:
    """Return the class of settings for a recipe in a person's file: nbgpu's own settings and the file's.

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
            # One of nbgpu's own settings, with another default.
            fields[setting.name] = (
                inherited.annotation,
                FieldInfo.merge_field_infos(inherited, default=setting.default),
            )
    try:
        model = create_model(f"{file.class_name}Config", __base__=OwnConfig, __doc__=file.summary, **fields)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{file.path}: {error}") from None
    model.CLASS_NAME = file.class_name
    model.METHODS = file.methods
    model.WHY_LOSSES_DIFFER = file.why_losses_differ
    replaced = {
        name: f"its method `{method}` decides"
        for method, names in _REPLACED.items()
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
    """The checked settings of one recipe.

    Args:
        recipe: its name, or the file of the user's own.
        values: the settings that are given; and `preset`, the name of one, whose values take the place of
            defaults.

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
    values = {name: typed_value(model, name, value) for name, value in given.items() if name != "preset"}
    if not given["preset"]:
        return {name: value for name, value in given.items() if name != "preset"}
    preset = presets.read(recipe, given["preset"]).values
    replaced = in_place_of_defaults(model, values, preset)
    return {name: value for name, value in {**replaced, **given}.items() if name in {*preset, *values}}


def settings_beside(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every setting of a recipe. A setting that is not given has the default of the
    `preset` among the given ones, else the one that depends on other settings, else the field's own. Nothing
    is checked.

    Raises:
        ConfigError: the recipe has no such preset.
    """
    model = settings_of(recipe)
    values = {name: typed_value(model, name, value) for name, value in with_preset(recipe, given).items()}
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
            condition.holds(typed_value(model, condition.name, varied[condition.name]))
            for condition in conditions(model, name)
            if condition.name in varied
        )
    }
    return train_config(recipe, **{**counting, **varied})
