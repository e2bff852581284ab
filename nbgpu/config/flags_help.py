"""The page that `--help` prints: flags in groups, each with its kind, meaning, bounds and default.

tyro, which parses the flags, lists them in one box and in the order of the fields; 120 of them want headings,
and some are not worth a beginner's look.
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
"""The words with which a person asks for the page."""

_WIDEST = 100
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
_OF_THE_RECIPE, _OF_THE_COMMAND = "Recipe", "Command"
_KINDS: Mapping[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT"}


@dataclass(frozen=True)
class Flag:
    """One flag on the page."""

    usage: str
    """'--batch-size INT', '--keep, --no-keep'."""
    meaning: str


def wanted(arguments: Iterable[str]) -> bool:
    """Whether these arguments ask for help."""
    return not {*arguments}.isdisjoint(WANTED)


def heading_of(model: type[BaseModel], name: str) -> str:
    """Return the heading under which a field's flag stands, by the class that declares the field."""
    brings = next(
        base for base in reversed(model.__mro__) if issubclass(base, BaseModel) and name in base.model_fields
    )
    if brings in _HEADINGS:
        return _HEADINGS[brings]
    return _OF_THE_RECIPE if issubclass(model, TrainConfig) else _OF_THE_COMMAND


def flag_of(
    name: str, info: FieldInfo, meaning: str, default: Any, is_switch: bool, kind: str | None = None
) -> Flag:
    """Return the flag of a field, as the page shows it.

    Args:
        name: the field.
        info: its type and bounds.
        meaning: its meaning.
        default: the value where the flag is left out; None and '' are not shown.
        is_switch: whether a truth value has no `--no-` form.
        kind: a word in place of the value, such as VALUE; left out: a word for its type.
    """
    flag = f"--{name.replace('_', '-')}"
    kinds = [each for each in types_of(info) if each is not NoneType]
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
    brackets = [*([allowed] if allowed else []), *([f"default {default_text}"] if default_text else [])]
    return Flag(usage, f"{meaning} ({'; '.join(brackets)})" if brackets else meaning)


def _kind(annotation: Any) -> str:
    """'INT', 'off|bf16|fp16', 'INT INT INT', 'NUMBER ...'."""
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
    """Print a page; no line is longer than the terminal is wide, nor than 100 columns."""
    # Settings are imported with every notebook, and rich only where somebody asks for help.
    from rich.text import Text

    from nbgpu.text.console import CommandConsole

    # In a notebook (`%nbgpu start --help`) it is text of the cell, and not one output for each line.
    console = CommandConsole(highlight=False, soft_wrap=True, force_jupyter=False)
    width = min(console.width, _WIDEST)

    def show_lines(lines: Iterable[tuple[str, str]]) -> None:
        for emphasized, plain in lines:
            console.print(Text.assemble((emphasized, "cyan"), plain))

    console.print(Text.assemble("usage: ", (usage, "bold")))
    console.print(f"\n{textwrap.fill(description, width)}", markup=False)
    if examples:
        console.print()
    for command, what in examples:
        show_lines(_indented(command, what, width))
    for heading, flags in groups.items():
        console.print(Text(f"\n{heading}", style="bold"))
        for flag in flags:
            show_lines(_two_columns(flag.usage, flag.meaning, width))
    if ending:
        console.print(f"\n{textwrap.fill(ending, width)}", markup=False)


def _indented(command: str, what: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield a command and, below it and indented, its effect, as lines of (emphasized text, plain text)."""
    yield f"  {command}", ""
    indent = " " * 6
    for line in textwrap.wrap(what, width, initial_indent=indent, subsequent_indent=indent):
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
