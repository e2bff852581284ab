"""Draws docs/map.svg: the rooms of the package from top to bottom, what each is for, and what it imports.

The order of the rooms is the list that the test of imports reads, what a room is for is the first line of its
docstring, and what it imports is read off the sources.
"""

from __future__ import annotations

import ast
import runpy
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "nbgpu"
MAP = DOCS / "map.svg"

_WIDTH, _GAP, _PADDING, _LINE = 1000, 10, 8, 15
_CHARACTERS_PER_PIXEL = 0.155

_STYLE = """
svg { font: 12px sans-serif; background: #fff; }
rect { fill: #f4f6f8; stroke: #8a97a5; }
text { fill: #1d2733; }
.side { font-size: 15px; font-weight: bold; }
.name { font: bold 13px monospace; }
.imports { fill: #5b6b7b; font-size: 11px; }
@media (prefers-color-scheme: dark) {
  svg { background: #16191d; }
  rect { fill: #22272e; stroke: #66727f; }
  text { fill: #e4e8ec; }
  .imports { fill: #a3afbb; }
}
"""


@dataclass(frozen=True)
class Room:
    """A box of the drawing."""

    name: str
    """Dotted, such as 'client.cells'; folders end in a slash where they are shown."""
    purpose: str
    imports: tuple[str, ...]
    """Rooms, in the order of the house."""

    def lines(self, width: float) -> list[tuple[str, str]]:
        """(class, text) of each line of the box."""
        columns = int(width * _CHARACTERS_PER_PIXEL)
        is_folder = (PACKAGE / self.name.replace(".", "/")).is_dir()
        name = self.name.replace(".", "/") + ("/" if is_folder else ".py")
        side = self.name.partition(".")[0] + "."
        imported = ", ".join(other.removeprefix(side) for other in self.imports)
        return [
            ("name", name),
            *(("purpose", line) for line in textwrap.wrap(self.purpose, columns)),
            *(("imports", line) for line in textwrap.wrap(f"imports {imported}", columns) if imported),
        ]


def rooms() -> list[Room]:
    """The rooms from top to bottom. The modules of `config`, and of a side's own folder, are one room
    here."""
    of_the_test = runpy.run_path(str(DOCS.parent / "tests" / "unit" / "test_imports.py"))
    order = list(dict.fromkeys(_room(entry) for entry in of_the_test["HOUSE"]))
    imports: dict[str, set[str]] = {name: set() for name in order}
    for found in of_the_test["_all_imports"]():
        if not found.imported.startswith("/"):
            imports[_room(found.importer)].add(_room(found.imported))
    return [
        Room(name, _purpose(name), tuple(other for other in order if other in imports[name] - {name}))
        for name in order
    ]


def _room(module: str) -> str:
    side, _, inside = module.partition(".")
    if side in {"client", "engine"} and inside:
        place = inside.partition(".")[0]
        return side if place == "__init__" else f"{side}.{place}"
    return side


def _purpose(name: str) -> str:
    path = PACKAGE / name.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ")


def drawing(found: Sequence[Room]) -> str:
    """The SVG: the notebook's side on the left, the ranks' on the right, and below both what they share."""
    named = {room.name: room for room in found}

    def of(*sides: str) -> list[Room]:
        return [room for name, room in named.items() if name.partition(".")[0] in sides and name not in empty]

    empty = {"client", "engine"}  # they have folders and nothing else
    half = (_WIDTH - 3 * _GAP) / 2
    top = _GAP + _LINE
    left, left_end = _column(
        "In the notebook's kernel, without torch", of("__init__", "cli", "ui", "client"), _GAP, top, half
    )
    right, right_end = _column("In every rank", of("recipes", "engine"), 2 * _GAP + half, top, half)
    drawn = {"__init__", "cli", "ui", "client", "recipes", "engine"}
    shared = [room for name, room in named.items() if name.partition(".")[0] not in drawn]
    below, end = _column("On both sides", shared, _GAP, max(left_end, right_end) + _GAP, _WIDTH - 2 * _GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {end:g}" width="{_WIDTH}" height="{end:g}">',
            "<title>The rooms of nbgpu, from top to bottom; imports only go down</title>",
            f"<style>{_STYLE}</style>",
            f'<text x="{_GAP}" y="{_GAP + 4}">{_figures(found)}</text>',
            *left,
            *right,
            *below,
            "</svg>\n",
        ]
    )


def _figures(found: Sequence[Room]) -> str:
    """How many rooms there are, and imports between them: of the folders at the top, within `client` and
    within `engine`."""
    imports = [(room.name, other) for room in found for other in room.imports]
    at_the_top = {(a.partition(".")[0], b.partition(".")[0]) for a, b in imports}
    parts = [
        f"{len({room.name.partition('.')[0] for room in found})} rooms and {sum(a != b for a, b in at_the_top)} imports"
    ]
    for side in ("client", "engine"):
        rooms_of_side = {a for pair in imports for a in pair if a.startswith(f"{side}.")}
        num_imports = sum({a, b} <= rooms_of_side for a, b in imports)
        parts.append(f"within {side} {len(rooms_of_side)} and {num_imports}")
    return "; ".join(parts)


def _column(title: str, found: Iterable[Room], x: float, y: float, width: float) -> tuple[list[str], float]:
    """The boxes of a column, and where it ends."""
    parts = [f'<text class="side" x="{x:g}" y="{y + _LINE:g}">{escape(title)}</text>']
    y += 2 * _LINE
    for room in found:
        lines = room.lines(width - 2 * _PADDING)
        height = len(lines) * _LINE + 2 * _PADDING
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        for number, (kind, text) in enumerate(lines, start=1):
            baseline = y + _PADDING + number * _LINE - 4
            parts.append(f'<text class="{kind}" x="{x + _PADDING:g}" y="{baseline:g}">{escape(text)}</text>')
        y += height + _GAP
    return parts, y


if __name__ == "__main__":
    MAP.write_text(drawing(rooms()))
