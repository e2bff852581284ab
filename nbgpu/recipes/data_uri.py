"""PNG pictures as data URIs, which are stored in a result and shown on a page."""

from __future__ import annotations

import base64
import io

from matplotlib.figure import Figure


def of_figure(figure: Figure) -> str:
    """Return a figure as a data URI, without a display."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
