"""Charts within HTML that stays in a notebook."""

from __future__ import annotations

import base64
import re


def as_image(svg: str, style: str = "width:100%") -> str:
    """Return HTML in which each SVG element is an image in this style; empty if there is no SVG element.

    JupyterLab takes SVG elements out of the HTML of a notebook that somebody else ran, and leaves their
    words. Images stay. The caller labels the image for screen readers.
    """
    return "".join(
        f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(element.encode()).decode()}" style="{style}">'
        for element in re.findall(r"<svg.*?</svg>", svg, re.DOTALL)
    )
