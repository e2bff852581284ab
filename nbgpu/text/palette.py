"""The colours of ranks and of activities, the same in every chart and every cell's output.

The eight colours of ranks are derived from the Okabe-Ito set (Okabe and Ito 2008, "Color Universal Design"),
some of which have too little contrast on a white or on a dark page. Each was moved, within its hue, to
maximise the smallest difference between two colours. That difference is at least 18 (CIE 1976) with common
colour vision, protanopia, deuteranopia and tritanopia, and the contrast is at least 3:1 on a white page and
on JupyterLab's dark one. tests/unit/text/test_palette.py checks both.
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
    """Return the colour of a rank as '#rrggbb'; from rank 8 on the eight colours repeat."""
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
"""The colours of a rank's activities in timelines and in the parts of a step: the same eight, and a grey for
the time between steps. The exchange of gradients and the wait for it have the same colour."""

TEXT_COLOR = "#7b7b7b"
"""A grey that is readable on a white page and on a dark one."""
