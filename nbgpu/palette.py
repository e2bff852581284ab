"""One colour for each rank, the same in every chart, chip and line of a cell's output.

The hues follow the Okabe-Ito set (Okabe and Ito 2008, "Color Universal Design"), which people with any
of the common forms of colour blindness can tell apart. Yellow and black are shifted so that each colour
has a contrast of at least 3:1 on a white page and on JupyterLab's dark one.
"""

from __future__ import annotations

RANK_COLORS = (
    "#2a84c6",  # blue
    "#d9790a",  # orange
    "#0f9b73",  # bluish green
    "#c2609b",  # reddish purple
    "#4aa3d8",  # sky blue
    "#d1521f",  # vermillion
    "#a08a00",  # dark yellow
    "#808080",  # grey
)


def rank_color(rank: int) -> str:
    """The colour of `rank` as '#rrggbb'; from rank 8 on the eight colours repeat."""
    return RANK_COLORS[rank % len(RANK_COLORS)]
