"""PNG pictures as data URIs, which are stored in a result and shown in a page."""

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
    """(H, W) in the colours of `matplotlib.image.imsave`, or (H, W, 3 or 4) as they are; one pixel each, the
    first row on top."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.ascontiguousarray(pixels), format="png", **colours)
    return _uri(buffer)


def middle_slices(volumes: Tensor, lowest: float, highest: float) -> str:
    """(N, D, H, W) as one row: the middle slice of each across its last axis, with the second axis upwards,
    `lowest` black and `highest` white."""
    middle = volumes[..., volumes.shape[-1] // 2]
    times = max(1, math.ceil(_MIN_TILE_PX / middle.shape[-1]))
    tiles = middle.transpose(1, 2).flip(1).repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    row = functional.pad(tiles, (0, _GAP_PX), value=highest).permute(1, 0, 2).flatten(1)[:, :-_GAP_PX]
    return of_pixels(row.numpy(), cmap="gray", vmin=lowest, vmax=highest)


def _uri(buffer: io.BytesIO) -> str:
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
