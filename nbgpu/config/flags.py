"""Command-line flags, derived from the models of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, make_dataclass
from typing import Annotated, Any

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nbgpu.config.conditions import meaning
from nbgpu.config.settings import bounds

SWITCH: Any = tyro.conf.FlagCreatePairsOff
"""Marks a truth value whose flag has no `--no-` form: `plan: Annotated[bool, SWITCH] = False`."""


def summary(model: type[BaseModel]) -> str:
    """The first line of a model's docstring; empty with `python -OO`, which leaves docstrings out."""
    return (model.__doc__ or "").partition("\n")[0]


def parse(
    models: Sequence[type[BaseModel]],
    arguments: Sequence[str],
    prog: str,
    defaults: Mapping[str, Any] | None = None,
    hidden: Sequence[str] = (),
    as_text: type[BaseModel] | None = None,
    description: str | None = None,
    first: Sequence[str] = (),
) -> dict[str, Any]:
    """Parse `--batch-size 4 --amp bf16` into {'batch_size': 4, 'amp': 'bf16', ...}, with one value for each
    field.

    Only the types are checked here. The model itself checks the bounds, so that the message about a bad value
    is the same on the command line, in a file and in the notebook.

    Args:
        models: the settings; every field becomes a flag with its description and bounds as help. Where two
            models have a field of the same name, as a recipe in the user's own file may, the flag is that of
            the first model.
        arguments: the arguments after the command.
        prog: the command, as the help shows it.
        defaults: values for omitted flags, in place of the fields' own defaults.
        hidden: fields that are not flags; the result does not have them.
        as_text: one of the models, whose flags take any text; an omitted flag gives None.
        first: where given, the only fields that `--help` lists; `--help-all` lists every one.
        description: the first line of the help; left out: that of the last model.

    Raises:
        SystemExit: the user asked for help, or a flag is unknown or of the wrong type; tyro has printed
            which.
    """
    flags: dict[str, tuple[str, Any, Any]] = {}
    joined: list[str] = []
    # A flag that tyro suppresses cannot be given either, so flags are left out of the short help alone.
    is_short_help = bool(first) and not {"--help", "-h"}.isdisjoint(arguments)
    for model, name, info in ((m, name, info) for m in models for name, info in m.model_fields.items()):
        if name in hidden or name in flags:
            continue
        allowed = bounds(info)
        help_text = f"{meaning(model, name)} ({allowed})" if allowed else meaning(model, name)
        default = (defaults or {}).get(name, info.default)
        if model is as_text:
            shown = tyro.conf.arg(help=f"{help_text} (default: {default})", metavar="VALUE[,...]")
            flags[name] = (name, Annotated[str | None, shown], field(default=None))
            continue
        kind = info.annotation
        if takes_several := _takes_several(info):
            kind, default = tuple[str, ...], (default,)
            joined.append(name)
        shown = tyro.conf.arg(help=help_text, metavar="VALUE[,...]" if takes_several else None)
        marks = [*_marks(info), *([tyro.conf.Suppress] if is_short_help and name not in first else [])]
        flags[name] = (name, Annotated[(kind, shown, *marks)], field(default=default))
    holder = make_dataclass("Settings", list(flags.values()))
    description = summary(models[-1]) if description is None else description
    if is_short_help:
        description = f"{description}\n\nThese flags matter most; --help-all lists every one."
    arguments = ["--help" if each == "--help-all" else each for each in arguments]
    values = asdict(tyro.cli(holder, args=arguments, prog=prog, description=description))
    return values | {name: ",".join(values[name]) for name in joined}


def _takes_several(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and "several" in extra


def _marks(info: FieldInfo) -> list[Any]:
    return [mark for mark in info.metadata if mark is SWITCH]


def given(arguments: Sequence[str], names: Iterable[str]) -> set[str]:
    """The fields whose flag stands among the arguments, also as `--no-name`."""
    flags = {each.partition("=")[0][2:].replace("-", "_") for each in arguments if each.startswith("--")}
    return {name for name in names if name in flags or f"no_{name}" in flags}


def values_of(arguments: Sequence[str], name: str) -> list[str | None]:
    """The values of a field's flag, given as `--name VALUE` or `--name=VALUE`; None where a value is
    missing."""
    found: list[str | None] = []
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("-", "_") != f"__{name}":
            continue
        following = value if equals else next(iter(arguments[place + 1 :]), "")
        found.append(following if following and not following.startswith("--") else None)
    return found
