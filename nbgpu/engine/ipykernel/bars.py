"""Progress bars of the ranks are text: a row for each rank, which the notebook draws in place.

`tqdm.auto` sees a Jupyter kernel in an engine and would make widgets, one for each bar and rank, that live in the rank.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def draw_as_text() -> None:
    """Lets `tqdm.auto` choose text in this process; `tqdm.notebook` still makes widgets for who asks for them."""
    if "tqdm.std" not in sys.modules:
        # torch has imported it wherever it is installed.
        return
    chosen = ModuleType("tqdm.autonotebook")
    chosen.__dict__.update({name: getattr(sys.modules["tqdm.std"], name) for name in ("tqdm", "trange")})
    sys.modules["tqdm.autonotebook"] = chosen


def keep_in_order_with_lines(shell: Any) -> None:
    """Sends what a cell writes in the order in which it was written, once it has drawn a bar.

    Bars are written to stderr and most lines to stdout. ipykernel keeps each stream's text for a while and sends one stream
    after the other, so that the notebook could not tell whether a line came before the end of a bar or after it. Cells
    without bars keep that: sending costs more than printing.
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
        """Begin a cell, which has drawn none yet."""
        self.is_there = False


def _send_other_first(stream: Any, other: Any, drawn: _Drawn) -> None:
    write = stream.write

    def write_in_order(text: str) -> Any:
        if not drawn.is_there and isinstance(text, str) and "\r" in text:
            drawn.is_there = True
        if drawn.is_there:
            # Only what waits: see nbgpu/engine/ipykernel/publishing.py.
            other.flush()
        return write(text)

    stream.write = write_in_order
