"""The page that `--help` prints: flags in groups, each with its type, meaning, bounds and default.

tyro, which parses the flags, would list all 120 in one box. This page has headings, and a short form for
beginners that lists only some flags.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.data import DataSettings
from nbgpu.config.settings import bounds, types_of
from nbgpu.config.training import (
    CheckpointSettings,
    LogSettings,
    LoopSettings,
    OptimizerSettings,
    ParallelSettings,
    PrecisionSettings,
    TrainConfig,
)

WANTED = ("--help", "-h", "--help-all")
"""The arguments that print the page."""

_MAX_WIDTH = 100
_FLAG_WIDTH = 26
_HEADINGS: Mapping[type[BaseModel], str] = {
    ClusterConfig: "Cluster",
    LoopSettings: "Length",
    OptimizerSettings: "Optimizer",
    PrecisionSettings: "Precision",
    ParallelSettings: "Parallel",
    DataSettings: "Data",
    CheckpointSettings: "Checkpoints",
    LogSettings: "Logs",
}
_KINDS: Mapping[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT"}


@dataclass(frozen=True)
class Flag:
    """One flag on the page."""

    usage: str
    """'--batch-size INT', '--keep, --no-keep'."""
    meaning: str


def wanted(arguments: Iterable[str]) -> bool:
    """Return whether the arguments ask for help."""
    return not {*arguments}.isdisjoint(WANTED)


def heading_of(model: type[BaseModel], name: str) -> str:
    """Return the heading of the group with a field's flag, by the class that declares the field."""
    declaring = next(
        base for base in reversed(model.__mro__) if issubclass(base, BaseModel) and name in base.model_fields
    )
    return _HEADINGS.get(declaring, "Recipe" if issubclass(model, TrainConfig) else "Command")


def flag_of(
    name: str, info: FieldInfo, meaning: str, default: Any, is_switch: bool, kind: str | None = None
) -> Flag:
    """Return the flag of a field, as the page shows it.

    Args:
        name: the name of the field.
        info: the field, for its type and bounds.
        meaning: the meaning of the field.
        default: the value of an omitted flag; None and '' are not shown.
        is_switch: whether the flag of a bool has no `--no-` form.
        kind: the placeholder for the value, such as VALUE. Default: one for the field's type.
    """
    flag = f"--{name.replace('_', '-')}"
    kinds = [kind for kind in types_of(info) if kind is not NoneType]
    annotation = kinds[0] if len(kinds) == 1 else info.annotation
    allowed = bounds(info)
    if annotation is bool and kind is None:
        usage = flag if is_switch else f"{flag}, --no-{flag[2:]}"
        default_text = "" if is_switch else ("on" if default else "off")
    else:
        kind = kind or _kind(annotation)
        usage = f"{flag} {kind}"
        items = default if isinstance(default, tuple) else [] if default is None else [default]
        default_text = " ".join(map(str, items))
        if "|" in kind:
            allowed = ""
        elif "CHOICE ..." in kind:
            choices = ", ".join(map(str, get_args(get_args(annotation)[0])))
            allowed = f"of {choices}; {allowed}" if allowed else f"of {choices}"
    brackets = [text for text in (allowed, f"default {default_text}" if default_text else "") if text]
    return Flag(usage, f"{meaning} ({'; '.join(brackets)})" if brackets else meaning)


def _kind(annotation: Any) -> str:
    """Return the placeholder for values of a type: 'INT', 'off|bf16|fp16', 'INT INT INT', 'NUMBER ...'."""
    if get_origin(annotation) is Literal:
        choices = "|".join(map(str, get_args(annotation)))
        return choices if len(choices) <= _FLAG_WIDTH - len("--amp ") else "CHOICE"
    if get_origin(annotation) is tuple:
        kinds = [_kind(item) for item in get_args(annotation) if item is not ...]
        return f"{kinds[0]} ..." if ... in get_args(annotation) else " ".join(kinds)
    return _KINDS.get(annotation, "VALUE")


def show(
    usage: str,
    description: str,
    groups: Mapping[str, Sequence[Flag]],
    examples: Sequence[tuple[str, str]] = (),
    ending: str = "",
) -> None:
    """Print the page, at most as wide as the terminal and 100 columns.

    Args:
        usage: the command line after 'usage:'.
        description: what the command does.
        groups: the flags by heading.
        examples: command lines with their effects.
        ending: a sentence below the flags.
    """
    # Imported here, because every notebook imports the settings, and only the help needs rich.
    from rich.text import Text

    from nbgpu.text.console import CommandConsole

    # In a notebook (`%nbgpu start --help`) the page is text of the cell, instead of one output per line.
    console = CommandConsole(highlight=False, soft_wrap=True, force_jupyter=False)
    width = min(console.width, _MAX_WIDTH)

    def show_lines(lines: Iterable[tuple[str, str]]) -> None:
        for emphasized, plain in lines:
            console.print(Text.assemble((emphasized, "cyan"), plain))

    console.print(Text.assemble("usage: ", (usage, "bold")))
    console.print(f"\n{textwrap.fill(description, width)}", markup=False)
    if examples:
        console.print()
    for command, effect in examples:
        show_lines(_indented(command, effect, width))
    for heading, flags in groups.items():
        console.print(Text(f"\n{heading}", style="bold"))
        for flag in flags:
            show_lines(_two_columns(flag.usage, flag.meaning, width))
    if ending:
        console.print(f"\n{textwrap.fill(ending, width)}", markup=False)


def _indented(command: str, effect: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield a command and, indented below it, its effect, as lines of (emphasized text, plain text)."""
    yield f"  {command}", ""
    indent = " " * 6
    for line in textwrap.wrap(effect, width, initial_indent=indent, subsequent_indent=indent):
        yield "", line


def _two_columns(usage: str, meaning: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield a flag with its meaning beside it, or below it if the flag is too long for its column, as lines
    of (emphasized text, plain text)."""
    column = _FLAG_WIDTH + 3
    lines = textwrap.wrap(meaning, width - column, break_long_words=False)
    if len(usage) <= _FLAG_WIDTH and lines:
        yield f"  {usage}", " " * (column - 2 - len(usage)) + lines.pop(0)
    else:
        for line in textwrap.wrap(usage, width, initial_indent="  ", subsequent_indent=" " * 6):
            yield line, ""
    for line in lines:
        yield "", " " * column + line
