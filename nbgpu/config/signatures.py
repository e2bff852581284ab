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
"""The length of lines of help."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def lists_settings(call: _Call) -> _Call:
    """Let `?` and Shift-Tab list the settings of every recipe below the docstring of a call. They ask an
    attribute for the text, which is made only then."""
    vars(call)["getdoc"] = lambda: f"{inspect.getdoc(call) or ''}\n\n{list_settings_of_every_recipe()}"
    return call


def names_of(model: type[BaseModel]) -> list[str]:
    """The settings that a call takes by name, those that the model itself adds before those that it has from
    others."""
    given_otherwise = {"recipe", *unused(model)}
    inherited = {name for base in model.__mro__[1:] for name in getattr(base, "model_fields", ())}
    names = [name for name in model.model_fields if name not in given_otherwise]
    return sorted(names, key=lambda name: name in inherited)


def _written(kind: Any) -> str:
    """Return a type as Python code for a signature. A tuple is written as a Sequence."""
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
        # Lists do as well.
        return f"Sequence[{_written(get_args(kind)[0])}]"
    return str(kind.__name__)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The texts that a field takes; empty where it takes others, too."""
    return tuple(
        each
        for kind in types_of(field)
        if get_origin(kind) is Literal
        for each in get_args(kind)
        if isinstance(each, str)
    )


def parameter(model: type[BaseModel], name: str, several: str = "") -> str:
    """A setting as a parameter: 'batch_size: int = 2'.

    Args:
        model: the model of the settings.
        name: the setting's name.
        several: what the call takes in place of one value, with {} for the setting's type: 'list[{}]'.
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
    """The parameter of each of these settings, with its help below it."""
    indent = " " * 8
    return "\n".join(
        f"    {parameter(model, name)}\n"
        + textwrap.fill(help_for(model, name), _WIDTH, initial_indent=indent, subsequent_indent=indent)
        for name in names
    )


def list_settings_of_every_recipe() -> str:
    """Return the settings that all recipes have, grouped under headings, and the names of those of one
    recipe."""
    parts = []
    for group, names in _groups():
        parts.append(f"{group}\n{listed(TrainConfig, names)}")
    of_recipes = [
        textwrap.fill(
            f"{recipe}: {', '.join(_own_fields(model))}",
            _WIDTH,
            initial_indent="    ",
            subsequent_indent=" " * 8,
        )
        for recipe, model in TRAIN_CONFIGS.items()
    ]
    return "\n\n".join(
        [
            "Settings of every recipe (Shift-Tab behind the recipe's name lists that recipe's own as well):",
            *parts,
            "Settings of single recipes:\n" + "\n".join(of_recipes),
        ]
    )


def _groups() -> Iterator[tuple[str, list[str]]]:
    left = set(names_of(TrainConfig))
    for base in reversed(TrainConfig.__mro__):
        if issubclass(base, BaseModel) and (names := [n for n in base.model_fields if n in left]):
            left -= {*names}
            yield (base.__doc__ or base.__name__).partition("\n")[0], names


def _own_fields(model: type[TrainConfig]) -> list[str]:
    return [name for name in names_of(model) if name not in TrainConfig.model_fields]
