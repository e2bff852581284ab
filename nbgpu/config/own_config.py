"""The settings of a recipe in the user's own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from nbgpu.config.own_file import RecipeFile
from nbgpu.config.settings import control
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError

RECIPE_GROUP = "Recipe"
"""The heading in the control panel of the settings of a recipe in the user's own file."""


_REPLACED: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer", "momentum"),
    "schedule": (
        "schedule",
        "warmup_steps",
        "warmup_epochs",
        "min_lr",
        "lr_decay",
        "lr_decay_every",
        "plateau_patience",
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
            "data",
            "dataset",
            "check_voxels",
            "cache_rate",
            "replace_rate",
            "cache_threads",
            "cache_dir",
            "transforms_on",
            "rotate90_prob",
            "flip_prob",
            "intensity_prob",
            "intensity_strength",
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
    fields: dict[str, Any] = {
        "recipe": (str, Field(str(file.path), description="the recipe file")),
    }
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
