"""One colour for each rank, the same in every chart, chip and line of a cell's output.

The eight began as the Okabe-Ito set (Okabe and Ito 2008, "Color Universal Design"), whose lighter colours
vanish on a white page and whose black vanishes on a dark one. A search then moved each, within its hue, to
where the two most alike differ most: by at least 18 (CIE 1976 colour difference) for people with common
colour vision, protanopia, deuteranopia and tritanopia alike, with a contrast of 3:1 or more on a white page
and on JupyterLab's dark one. tests/unit/text/test_palette.py holds the colours to that.
"""

from __future__ import annotations

RANK_COLORS = (
    "#009aea",  # blue
    "#a6510a",  # brown
    "#05845e",  # green
    "#ab86b6",  # mauve
    "#7153e2",  # violet
    "#c6003f",  # crimson
    "#b38f00",  # dark yellow
    "#4b6773",  # slate
)


def rank_color(rank: int) -> str:
    """The colour of `rank` as '#rrggbb'; from rank 8 on the eight colours repeat."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


KIND_COLORS = {
    "data": "#b38f00",
    "forward": "#009aea",
    "backward": "#7153e2",
    "optimizer": "#05845e",
    "other": "#4b6773",
    "waiting": "#c6003f",
    "transfer": "#a6510a",
    "blocked": "#c6003f",
    "exchange": "#a6510a",
    "collective": "#ab86b6",
    "statistics": "#ab86b6",
    "between": "#9a9a9a",
}
"""The colours of what a rank does, in timelines and in the parts of a step: the same eight, and a grey for
what is done between steps. What waits for gradients and the gradients themselves have the same one."""

TEXT_COLOR = "#7b7b7b"
"""A grey that is readable on a white page and on a dark one."""
