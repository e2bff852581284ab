"""Charts within HTML that stays in a notebook."""

from __future__ import annotations

import base64
import re


def as_image(svg: str) -> str:
    """Return each SVG element as an image, for HTML that is an output; nothing stays nothing.

    JupyterLab takes SVG elements out of the HTML of a notebook that somebody else ran, and leaves the words
    in them. Images stay. Whoever places this names it for screen readers.
    """
    return "".join(map(_as_image, re.findall(r"<svg.*?</svg>", svg, re.DOTALL)))


def _as_image(svg: str) -> str:
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img alt="" src="data:image/svg+xml;base64,{encoded}" style="width:100%">'
