"""PNG pictures as data URIs, which are stored in a result and shown on a page."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_MIN_TILE_PX = 96
_GAP_PX = 4


def of_figure(figure: Figure) -> str:
    """Return a figure as a data URI, without a display."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return _uri(buffer)


def of_pixels(pixels: NDArray[Any], **colours: Any) -> str:
    """Return an array as a data URI, with one pixel per element and the first row at the top.

    (H, W) is coloured by `matplotlib.image.imsave`; (H, W, 3 or 4) is used as it is.
    """
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.ascontiguousarray(pixels), format="png", **colours)
    return _uri(buffer)


def middle_slices(volumes: Tensor, lowest: float, highest: float) -> str:
    """Return the middle slices of volumes (N, D, H, W) side by side as a data URI.

    The slices are perpendicular to the last axis, with the H axis pointing up, `lowest` in black and
    `highest` in white.
    """
    middle = volumes[..., volumes.shape[-1] // 2]
    times = max(1, math.ceil(_MIN_TILE_PX / middle.shape[-1]))
    tiles = middle.transpose(1, 2).flip(1).repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    row = functional.pad(tiles, (0, _GAP_PX), value=highest).permute(1, 0, 2).flatten(1)[:, :-_GAP_PX]
    return of_pixels(row.numpy(), cmap="gray", vmin=lowest, vmax=highest)


def _uri(buffer: io.BytesIO) -> str:
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
