"""Command-line flags, derived from the models of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, make_dataclass
from typing import Annotated, Any

import tyro
from pydantic import BaseModel

from nbgpu.config import flags_help
from nbgpu.config.conditions import default_of, meaning
from nbgpu.config.settings import bounds, mark_of

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
    examples: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Parse `--batch-size 4 --amp bf16` into {'batch_size': 4, 'amp': 'bf16', ...}, with a value for every
    field.

    Only the types are checked here. The model itself checks the bounds, so that the message about a bad value
    is the same on the command line, in a file and in the notebook.

    Args:
        models: the settings; every field becomes a flag with its description and bounds as help. If two
            models have a field of the same name, as a recipe in the user's file may, the first model's field
            is taken.
        arguments: the arguments after the command.
        prog: the command, as the help shows it.
        defaults: values for omitted flags, instead of the fields' defaults.
        hidden: fields that are not flags; the result does not have them.
        as_text: one of the models, whose flags take any text; an omitted flag gives None.
        first: if given, the only fields that `--help` lists; `--help-all` lists all.
        description: the first line of the help. Default: that of the last model.
        examples: command lines that the help shows, each with its effect.

    Raises:
        SystemExit: the user asked for help, or a flag is unknown or of the wrong type; the help or the error
            has been printed.
    """
    description = summary(models[-1]) if description is None else description
    flags: dict[str, tuple[str, Any, Any]] = {}
    joined: list[str] = []
    is_help = flags_help.wanted(arguments)
    is_short_help = bool(first) and "--help-all" not in arguments
    groups: dict[str, list[flags_help.Flag]] = {}
    for model, name, info in ((m, name, info) for m in models for name, info in m.model_fields.items()):
        if name in hidden or name in flags:
            continue
        allowed = bounds(info)
        help_text = f"{meaning(model, name)} ({allowed})" if allowed else meaning(model, name)
        default = (defaults or {}).get(name, default_of(model, name))
        takes_several, is_text = bool(mark_of(info, "several")), model is as_text
        metavar = "VALUE[,...]" if takes_several or is_text else None
        switch = [mark for mark in info.metadata if mark is SWITCH]
        if is_help:
            if not is_short_help or name in first:
                flag = flags_help.flag_of(name, info, meaning(model, name), default, bool(switch), metavar)
                groups.setdefault(flags_help.heading_of(model, name), []).append(flag)
            # For help tyro is not called, and only the number of flags is used below.
            flags[name] = (name, None, None)
            continue
        annotation: Any = info.annotation
        if is_text:
            annotation, default, switch = str | None, None, []
        elif takes_several:
            annotation, default = tuple[str, ...], (default,)
            joined.append(name)
        argument = tyro.conf.arg(help=help_text, metavar=metavar)
        flags[name] = (name, Annotated[(annotation, argument, *switch)], field(default=default))
    if is_help:
        others = len(flags) - sum(map(len, groups.values()))
        ending = f"--help-all lists the {others} other flags as well." if others else ""
        flags_help.show(f"{prog} [FLAGS]", description, groups, examples, ending)
        raise SystemExit(0)
    holder = make_dataclass("Settings", list(flags.values()))
    values = asdict(tyro.cli(holder, args=arguments, prog=prog, description=description, add_help=False))
    return values | {name: ",".join(values[name]) for name in joined}


def given(arguments: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return the fields whose flag is among the arguments, also as `--no-name`."""
    flags = {
        argument.partition("=")[0][2:].replace("-", "_")
        for argument in arguments
        if argument.startswith("--")
    }
    return {name for name in names if name in flags or f"no_{name}" in flags}


def values_of(arguments: Sequence[str], name: str) -> list[str | None]:
    """Return the values of a field's flag, given as `--name VALUE` or `--name=VALUE`; None for a flag without
    a value."""
    values: list[str | None] = []
    for argument, next_argument in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, equals, value = argument.partition("=")
        if flag.replace("-", "_") == f"__{name}":
            value = value if equals else next_argument
            values.append(value if value and not value.startswith("--") else None)
    return values
