"""Charts within HTML that stays in a notebook."""

from __future__ import annotations

import base64
import re


def as_image(svg: str, style: str = "width:100%") -> str:
    """Return each SVG element as an image in this style, for HTML that is an output; nothing stays nothing.

    JupyterLab takes SVG elements out of the HTML of a notebook that somebody else ran, and leaves the words
    in them. Images stay. Whoever places this names it for screen readers.
    """
    return "".join(
        f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(element.encode()).decode()}" style="{style}">'
        for element in re.findall(r"<svg.*?</svg>", svg, re.DOTALL)
    )
