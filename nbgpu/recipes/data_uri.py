"""PNG pictures as data URIs, which are stored in a result and shown on a page."""

from __future__ import annotations

import base64
import io

from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from torch import Tensor

from nbgpu.recipes.side_by_side import Colours, row
from nbgpu.text.palette import TEXT_COLOR


def of_figure(figure: Figure) -> str:
    """Return a figure as a data URI, without a display, to be read on a white page and on a dark one."""
    _write_in_grey(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _write_in_grey(figure: Figure) -> None:
    """Let the page show around the axes, and what is black in a figure be grey."""
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.tick_params(which="both", colors=TEXT_COLOR)
        for spine in axes.spines.values():
            spine.set_edgecolor(TEXT_COLOR)
    for legend in figure.findobj(Legend):
        legend.set_frame_on(False)
    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(TEXT_COLOR)


def of_middle_slices(volumes: Tensor, colours: Colours) -> str:
    """Return the middle slices of volumes (N, D, H, W) side by side as a data URI. They are perpendicular to
    the last axis, with the H axis pointing up."""
    return row_of_slices(volumes[..., volumes.shape[-1] // 2], colours)


def row_of_slices(slices: Tensor, colours: Colours) -> str:
    """Return slices (N, D, H) side by side as a data URI, with the H axis pointing up."""
    return of_figure(row([one.T.numpy() for one in slices], colours))
