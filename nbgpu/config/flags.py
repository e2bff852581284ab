"""Command-line flags, derived from the models of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, make_dataclass
from typing import Annotated, Any

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
        examples: command lines that the help shows, and what each does.

    Raises:
        SystemExit: the user asked for help, or a flag is unknown or of the wrong type; which is printed.
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
        if is_help:
            if not is_short_help or name in first:
                kind = "VALUE[,...]" if takes_several or is_text else None
                shown = flags_help.flag_of(
                    name, info, meaning(model, name), default, bool(_marks(info)), kind
                )
                groups.setdefault(flags_help.heading_of(model, name), []).append(shown)
            # For help tyro is not called: below only the number of flags counts.
            flags[name] = (name, None, None)
            continue
        if is_text:
            shown_by_tyro = tyro.conf.arg(help=help_text, metavar="VALUE[,...]")
            flags[name] = (name, Annotated[str | None, shown_by_tyro], field(default=None))
            continue
        kind_of_value = info.annotation
        if takes_several:
            kind_of_value, default = tuple[str, ...], (default,)
            joined.append(name)
        shown_by_tyro = tyro.conf.arg(help=help_text, metavar="VALUE[,...]" if takes_several else None)
        flags[name] = (name, Annotated[(kind_of_value, shown_by_tyro, *_marks(info))], field(default=default))
    if is_help:
        others = len(flags) - sum(map(len, groups.values()))
        ending = f"--help-all lists the {others} other flags as well." if others else ""
        flags_help.show(f"{prog} [FLAGS]", description, groups, examples, ending)
        raise SystemExit(0)
    holder = make_dataclass("Settings", list(flags.values()))
    values = asdict(tyro.cli(holder, args=arguments, prog=prog, description=description, add_help=False))
    return values | {name: ",".join(values[name]) for name in joined}


def _marks(info: FieldInfo) -> list[Any]:
    return [mark for mark in info.metadata if mark is SWITCH]


def given(arguments: Sequence[str], names: Iterable[str]) -> set[str]:
    """The fields whose flag stands among the arguments, also as `--no-name`."""
    flags = {
        argument.partition("=")[0][2:].replace("-", "_")
        for argument in arguments
        if argument.startswith("--")
    }
    return {name for name in names if name in flags or f"no_{name}" in flags}


def values_of(arguments: Sequence[str], name: str) -> list[str | None]:
    """The values of a field's flag, given as `--name VALUE` or `--name=VALUE`; None where a value is
    missing."""
    values: list[str | None] = []
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("-", "_") != f"__{name}":
            continue
        next_argument = arguments[index + 1] if index + 1 < len(arguments) else ""
        following = value if equals else next_argument
        values.append(following if following and not following.startswith("--") else None)
    return values
