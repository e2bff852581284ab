"""PNG pictures as data URIs, which a result carries and a page shows."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib.image
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray


def of_figure(figure: Figure) -> str:
    """A figure as it is laid out, drawn without a display."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png")
    return _uri(buffer)


def of_pixels(pixels: NDArray[Any], **colours: Any) -> str:
    """(H, W) in the colours of `matplotlib.image.imsave`, or (H, W, 3 or 4) as they are; one pixel each, the first row on top."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.ascontiguousarray(pixels), format="png", **colours)
    return _uri(buffer)


def _uri(buffer: io.BytesIO) -> str:
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
