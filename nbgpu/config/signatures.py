"""Settings as the parameters of a call: their types, defaults and help, for notebooks and for editors."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nbgpu.config.conditions import meaning
from nbgpu.config.recipe_packages import TRAIN_CONFIGS
from nbgpu.config.settings import bounds, types_of, unused
from nbgpu.config.training import TrainConfig

_WIDTH = 76
"""The width of the help in characters."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def lists_settings(call: _Call) -> _Call:
    """Decorate a function so that `?` and Shift-Tab list the settings of every recipe below its docstring.

    IPython calls an object's `getdoc` for its help, so that the text is made only then.
    """
    vars(call)["getdoc"] = lambda: f"{inspect.getdoc(call) or ''}\n\n{list_settings_of_every_recipe()}"
    return call


def names_of(model: type[BaseModel]) -> list[str]:
    """Return the settings that a call takes by keyword, those that the model itself adds before inherited
    ones."""
    excluded = {"recipe", *unused(model)}
    inherited = {name for base in model.__mro__[1:] for name in getattr(base, "model_fields", ())}
    names = [name for name in model.model_fields if name not in excluded]
    return sorted(names, key=lambda name: name in inherited)


def _written(kind: Any) -> str:
    """Return a type as Python code for a signature. A tuple is written as a Sequence, because calls also take
    lists."""
    if kind is NoneType:
        return "None"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(_written(member) for member in get_args(kind))
    if get_origin(kind) is Literal:
        choices = ", ".join(
            f'"{member}"' if isinstance(member, str) else repr(member) for member in get_args(kind)
        )
        return f"Literal[{choices}]"
    if get_origin(kind) is tuple:
        return f"Sequence[{_written(get_args(kind)[0])}]"
    return str(kind.__name__)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the texts of a field's `Literal` types; empty if it has none."""
    return tuple(
        choice
        for kind in types_of(field)
        if get_origin(kind) is Literal
        for choice in get_args(kind)
        if isinstance(choice, str)
    )


def parameter(model: type[BaseModel], name: str, several: str = "") -> str:
    """Return a setting as a parameter: 'batch_size: int = 2'.

    Args:
        model: the class of the settings.
        name: the setting's name.
        several: another type that the call takes, with {} for the setting's type: 'list[{}]'.
    """
    field = model.model_fields[name]
    default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
    written = _written(field.annotation)
    kinds = f"{written} | {several.format(written)}" if several else written
    return f"{name}: {kinds} = {default}"


def help_for(model: type[BaseModel], name: str) -> str:
    """Return the meaning of a setting, with its bounds."""
    field = model.model_fields[name]
    allowed = "" if choices_of(field) else bounds(field)
    return f"{meaning(model, name)} ({allowed})" if allowed else meaning(model, name)


def listed(model: type[BaseModel], names: Iterable[str]) -> str:
    """Return the parameter of each of these settings, with its help below it."""
    indent = " " * 8
    return "\n".join(
        f"    {parameter(model, name)}\n"
        + textwrap.fill(help_for(model, name), _WIDTH, initial_indent=indent, subsequent_indent=indent)
        for name in names
    )


def list_settings_of_every_recipe() -> str:
    """Return the settings that all recipes have, grouped under headings, and the names of each recipe's
    further settings."""
    parts = [f"{group}\n{listed(TrainConfig, names)}" for group, names in _groups()]
    further = []
    for recipe, model in TRAIN_CONFIGS.items():
        names = ", ".join(name for name in names_of(model) if name not in TrainConfig.model_fields)
        further.append(
            textwrap.fill(f"{recipe}: {names}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 8)
        )
    return "\n\n".join(
        [
            "Settings of every recipe (Shift-Tab behind the recipe's name lists that recipe's own as well):",
            *parts,
            "Settings of single recipes:\n" + "\n".join(further),
        ]
    )


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, settings) for each base class of TrainConfig that declares settings."""
    left = set(names_of(TrainConfig))
    for base in reversed(TrainConfig.__mro__):
        if issubclass(base, BaseModel) and (names := [n for n in base.model_fields if n in left]):
            left -= {*names}
            yield (base.__doc__ or base.__name__).partition("\n")[0], names
