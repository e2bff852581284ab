"""The cards of the devices as text, in colour if the output is a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nbgpu.client.host.device_cards import DeviceCard, HostDevices
from nbgpu.host.gpu_holders import State

_COLORS: dict[State, str] = {
    "free": "green",
    "this notebook": "blue",
    "yours": "blue",
    "others": "yellow",
    "unreadable": "red",
}
_INDENT = 2
_MEMORY_BAR, _LOAD_BAR = 8, 6
"""The widths of the bars in columns, by which memory, load and heat fit into a line of 80."""


def cards(devices: HostDevices) -> RenderableType:
    """Every device as a card of several lines. The MIG partitions of a GPU stand below its name."""
    parts: list[RenderableType] = []
    for gpu, group in groupby(devices.cards, key=lambda card: card.group):
        members = list(group)
        if gpu:
            title = Text(f"{gpu}, split into parts (MIG)", style="bold")
            parts.append(_sides(title, Text(members[0].heat_in_words())))
            parts += (Padding(_card(partition), (0, 0, 0, _INDENT)) for partition in members)
        else:
            parts += map(_card, members)
    return Group(*parts, *_note(devices))


def rows(devices: HostDevices, num_lines: int) -> RenderableType:
    """Return one line for each device, as many as fit into `num_lines`, below the names of the models."""
    title_width = max(len(card.title) for card in devices.cards)
    lines: list[RenderableType] = []
    for name, members in groupby(devices.cards, key=lambda card: card.group or card.name):
        if name:
            lines.append(Text(name, style="dim", no_wrap=True, overflow="ellipsis"))
        lines += (_row(card, title_width) for card in members)
    note = _note(devices)
    if len(lines) + len(note) > num_lines:
        lines = lines[: max(0, num_lines - len(note) - 1)]
        num_shown = sum(isinstance(line, Table) for line in lines)
        lines.append(Text(f"and {len(devices.cards) - num_shown} more: the window is too small for them"))
    return Group(*lines, *note)


@dataclass(frozen=True)
class Screen:
    """A line, and below it the cards, or a line for each device if the cards do not fit into the window."""

    head: Text
    devices: HostDevices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        num_lines = (options.height or console.size.height) - 1
        all_cards = cards(self.devices)
        fits = len(console.render_lines(all_cards, options.update(height=None))) <= num_lines
        yield self.head
        yield all_cards if fits else rows(self.devices, num_lines)


def _card(card: DeviceCard) -> RenderableType:
    """Return the card of one device: its title and holder, its bars, and a sentence about a device in use."""
    title = Text.assemble((card.title, "bold"), "  ", "" if card.group else card.name)
    load = None if card.utilization_percent is None else card.utilization_percent / 100
    parts: list[RenderableType] = [
        _labelled_bar("memory", _share(card), card.memory_in_words(), _MEMORY_BAR, len("31.2 of 80.0 GiB")),
        _labelled_bar("load", load, card.load_in_words(), _LOAD_BAR, len("100 % busy")),
    ]
    parts += [Text(words) for words in ("" if card.group else card.heat_in_words(), card.neighbours) if words]
    lines: list[RenderableType] = [_sides(title, _holder(card)), Padding(_Flow(parts), (0, 0, 0, _INDENT))]
    if card.why:
        why = Text(card.why, style="red" if card.state == "unreadable" else "")
        lines.append(Padding(why, (0, 0, 0, _INDENT)))
    return Group(*lines)


def _row(card: DeviceCard, title_width: int) -> Table:
    """Return one device as a line, with the same columns as all other lines."""
    row = Table.grid(padding=(0, 1))
    row.add_column(width=title_width + _INDENT, no_wrap=True)
    row.add_column(width=_MEMORY_BAR)
    for width in (len("31.2 of 80.0 GiB"), len("100 % busy"), len("72 °C 585 W")):
        row.add_column(min_width=width, justify="right", no_wrap=True)
    row.add_column(no_wrap=True, overflow="ellipsis")
    bar = _bar(_share(card), _MEMORY_BAR)
    title = Text(f"{'':{_INDENT}}{card.title}")
    heat = [] if card.temperature_c is None else [f"{card.temperature_c:.0f} °C"]
    heat += [] if card.power_w is None else [f"{card.power_w:.0f} W"]
    row.add_row(title, bar, card.memory_in_words(), card.load_in_words(), " ".join(heat), _holder(card))
    return row


def _holder(card: DeviceCard) -> Text:
    return Text.assemble(("● ", _COLORS[card.state]), card.holder)


def _sides(left: Text, right: Text) -> Table:
    """A line with one text at the left end and one at the right end."""
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1)
    table.add_column(justify="right")
    table.add_row(left, right)
    return table


def _share(card: DeviceCard) -> float | None:
    """The share of the memory that is used, from 0 to 1; None if it is not known."""
    if card.used_bytes is None or not card.total_bytes:
        return None
    return card.used_bytes / card.total_bytes


def _bar(share: float | None, width: int) -> RenderableType:
    return Text("") if share is None else ProgressBar(total=1, completed=share, width=width)


def _labelled_bar(name: str, share: float | None, value_text: str, bar_width: int, text_width: int) -> Table:
    """Return one row: a name, a bar for a share of 0..1 (no bar for None), and the value as text. The widths
    are in columns of the terminal."""
    table = Table.grid(padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(width=bar_width)
    table.add_column(no_wrap=True, min_width=text_width, justify="right")
    table.add_row(name, _bar(share, bar_width), Text(value_text))
    return table


@dataclass(frozen=True)
class _Flow:
    """Parts side by side, in as many lines as the window needs."""

    parts: list[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay the parts out from left to right, and begin a new line before a part that does not fit."""
        lines: list[list[RenderableType]] = []
        free_width = 0
        for part in self.parts:
            width = console.measure(part, options=options).maximum
            if not lines or width > free_width:
                lines.append([])
                free_width = options.max_width
            lines[-1].append(part)
            free_width -= width + _INDENT
        for line in lines:
            table = Table.grid(padding=(0, _INDENT), pad_edge=False)
            table.add_row(*line)
            yield table


def _note(devices: HostDevices) -> list[RenderableType]:
    return [Text(devices.note)] if devices.note else []
