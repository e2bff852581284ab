"""Draws the ranks' progress bars as text: a row for each rank, which the notebook updates in place.

`tqdm.auto` takes an engine for a Jupyter kernel and would make a widget for each bar and rank, which lives in
the rank.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def draw_as_text() -> None:
    """Make `tqdm.auto` choose text in this process; `tqdm.notebook` still makes widgets."""
    if "tqdm.std" not in sys.modules:
        # torch imports tqdm if it is installed.
        return
    chosen = ModuleType("tqdm.autonotebook")
    chosen.__dict__.update({name: getattr(sys.modules["tqdm.std"], name) for name in ("tqdm", "trange")})
    sys.modules["tqdm.autonotebook"] = chosen


def keep_in_order_with_lines(shell: Any) -> None:
    """Send a cell's text in the order in which it was written, once the cell has drawn a bar.

    Bars are written to stderr and most lines to stdout. ipykernel buffers each stream's text and sends one
    stream after the other, so that the notebook could not tell whether a line came before the end of a bar or
    after it. For cells without bars the buffering stays, because sending costs more than printing.
    """
    streams = (sys.stdout, sys.stderr)
    drawn = _Drawn()
    shell.events.register("pre_run_cell", drawn.forget)
    for stream, other in zip(streams, reversed(streams), strict=True):
        _send_other_first(stream, other, drawn)


class _Drawn:
    """Whether the running cell has drawn a bar."""

    def __init__(self) -> None:
        self.is_there = False

    def forget(self, _: Any) -> None:
        """Begin a cell, which has drawn no bar yet."""
        self.is_there = False


def _send_other_first(stream: Any, other: Any, drawn: _Drawn) -> None:
    write = stream.write

    def write_in_order(text: str) -> Any:
        if not drawn.is_there and isinstance(text, str) and "\r" in text:
            drawn.is_there = True
        if drawn.is_there:
            # This sends only if there is text: see nbgpu/engine/ipykernel/publishing.py.
            other.flush()
        return write(text)

    stream.write = write_in_order
