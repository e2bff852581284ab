"""The text of several ranks as HTML: blocks with the labels of their ranks, and radio buttons for the rank
whose text is shown.

The choice works by CSS alone, so that it works in a notebook without a kernel, in VS Code and in the output
of nbconvert. Where styles are not allowed, as on GitHub, the text of all ranks appears with its labels.
"""

from __future__ import annotations

import html
import uuid
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from IPython.display import display

from nbgpu.client.cells.merging import Block
from nbgpu.client.cells.outputs import FILE, NOTE
from nbgpu.package import STATIC
from nbgpu.text.palette import rank_color
from nbgpu.text.ranks import rank_ranges
from nbgpu.ui.cell.ansi import to_html

ALL = "all"


class StillText:
    """A view that shows all text at once when it is closed.

    Args:
        ranks: the ranks that run the cell.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._blocks: list[Block] = []

    def add(self, blocks: Sequence[Block]) -> None:
        self._blocks += blocks

    def show_rows(self, rows: Sequence[Block]) -> None:
        """Do nothing: rows are lines that may still change, and the text is shown when it is complete."""

    def close(self) -> None:
        display(bundle(self._ranks, self._blocks), raw=True)


def bundle(ranks: Sequence[int], blocks: Sequence[Block], chosen: str = ALL) -> dict[str, Any]:
    """The output that stays in the notebook: the text as HTML with the choice, and as plain text."""
    return {
        "text/html": page(ranks, blocks, chosen=chosen),
        "text/plain": "".join(_plain(block) for block in blocks).rstrip("\n"),
    }


def differs(blocks: Iterable[Block]) -> bool:
    """Whether the ranks have printed different text."""
    return len({block.ranks for block in blocks if block.kind not in (NOTE, FILE)}) > 1


def page(ranks: Sequence[int], blocks: Sequence[Block], rows: str = "", chosen: str = ALL) -> str:
    """The whole view as HTML.

    Args:
        ranks: the ranks to choose from.
        blocks: the text of the ranks.
        rows: the HTML of lines that may still change, such as progress bars, below the text.
        chosen: the number of the chosen rank, or 'all'.
    """
    hidden = "" if differs(blocks) else " hidden"
    name = f"nbgpu-{uuid.uuid4().hex}"
    choices = "".join(_choice(name, value, chosen) for value in (ALL, *map(str, ranks)))
    lines = "".join(map(block_html, _joined(blocks)))
    # A label has the ranks, two brackets, and the padding of 1.75ch that text.css gives it.
    label_ch = len(rank_ranges(ranks)) + 2 + 1.75
    css = _css() + "".join(map(_only, ranks))
    return (
        f'<div class="nbgpu-text" style="--nbgpu-label:{label_ch}ch"><style>{css}</style>'
        f'<div class="nbgpu-whose" role="radiogroup" aria-label="Output of"{hidden}>{choices}</div>'
        f'<div class="nbgpu-lines">{lines}</div><div class="nbgpu-rows">{rows}</div></div>'
    )


def block_html(block: Block) -> str:
    """One block as HTML: its label and its lines."""
    if block.kind == NOTE:
        return f'<div class="nbgpu-note">{html.escape(" ".join(block.texts))}</div>'
    if block.kind == FILE:
        paths = "".join(f'<a href="{html.escape(path)}">{html.escape(path)}</a>' for path in block.texts)
        return f'<div class="nbgpu-note">{paths}</div>'
    classes = " ".join(f"nbgpu-r{rank}" for rank in block.ranks)
    color = f' style="--nbgpu-rank:{rank_color(block.ranks[0])}"' if len(block.ranks) == 1 else ""
    kind = "error output" if block.kind == "stderr" else "output"
    label = f"{kind} of rank{'s' if len(block.ranks) > 1 else ''} {rank_ranges(block.ranks)}"
    return (
        f'<div class="nbgpu-said nbgpu-{block.kind} {classes}"{color} role="group" aria-label="{label}">'
        f'<b class="nbgpu-ranks">[{rank_ranges(block.ranks)}]</b><pre>{lines_html(block.texts)}</pre></div>'
    )


def lines_html(texts: Sequence[str]) -> str:
    return to_html("\n".join(texts))


def _joined(blocks: Iterable[Block]) -> list[Block]:
    """Join consecutive blocks of the same ranks and kind."""
    joined: list[Block] = []
    for block in blocks:
        if joined and joins(joined[-1], block):
            joined[-1].texts.extend(block.texts)
        else:
            joined.append(Block(block.ranks, block.kind, list(block.texts)))
    return joined


def joins(before: Block, block: Block) -> bool:
    """Whether a block continues the one before it."""
    return (before.ranks, before.kind) == (block.ranks, block.kind)


def _choice(name: str, value: str, chosen: str) -> str:
    """Return the radio button for one rank, or for all ranks, with its label."""
    color = "" if value == ALL else f' style="--nbgpu-rank:{rank_color(int(value))}"'
    label = "all ranks" if value == ALL else f"rank {value}"
    checked = " checked" if value == chosen else ""
    # Without this attribute, JupyterLab would use the arrow keys to move from cell to cell.
    keep_keys = 'data-lm-suppress-shortcuts="true"'
    return (
        f'<label{color}><input type="radio" name="{name}" value="{value}" aria-label="{label}" {keep_keys}{checked}>'
        f"<span>{value}</span></label>"
    )


def _only(rank: int) -> str:
    """The CSS rule that hides the text of all other ranks while a rank is chosen."""
    return (
        f'.nbgpu-text:has(.nbgpu-whose input[value="{rank}"]:checked) .nbgpu-said:not(.nbgpu-r{rank})'
        "{display:none}"
    )


def _plain(block: Block) -> str:
    label = "" if block.kind == NOTE else f"[{rank_ranges(block.ranks)}] "
    return "".join(f"{label}{text}\n" for text in block.texts)


@cache
def _css() -> str:
    return (STATIC / "text.css").read_text().strip()
