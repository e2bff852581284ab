"""Text and charts as HTML for the outputs of notebooks.

JupyterLab wraps plain text in the middle of words, so text is also given as HTML.
"""

from __future__ import annotations

import base64
import html
import re
from itertools import groupby

_SENTENCES = "margin:0 0 4px;line-height:1.4;white-space:pre-wrap;overflow-wrap:break-word"
_TABLE = "margin:0 0 4px;line-height:1.35;white-space:pre;overflow-x:auto;word-break:normal"
_LABEL = "text-align:left;vertical-align:top;white-space:nowrap;font-weight:normal;opacity:0.75"
_VALUE = "text-align:left;white-space:pre-line;overflow-wrap:break-word"


def as_html(text: str) -> str:
    """Return plain text as HTML: sentences wrap between words, and tables keep their lines and scroll.

    A line that contains several blanks in a row is part of a table, as `text.tables.aligned` formats it.
    """
    parts = []
    for is_table, lines in groupby(text.split("\n"), lambda line: "  " in line.strip()):
        escaped = html.escape("\n".join(lines))
        parts.append(
            f'<pre style="{_TABLE}">{escaped}</pre>'
            if is_table
            else f'<div style="{_SENTENCES}">{escaped}</div>'
        )
    return "".join(parts)


def shown_as_html(self: object) -> str:
    """Return the text of an object as HTML. Classes that print as text use this as their `_repr_html_`."""
    return as_html(str(self))


def labelled(rows: list[tuple[str, str]]) -> str:
    """Return an HTML table with two columns, names and values; values wrap between words."""
    cells = "".join(
        f'<tr style="background:none"><td style="{_LABEL}">{html.escape(name)}</td>'
        f'<td style="{_VALUE}">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><tbody>{cells}</tbody></table>"


def as_image(svg: str, style: str = "width:100%") -> str:
    """Return each SVG element in an HTML text as an <img> element; empty if there is none.

    JupyterLab removes SVG elements, but not images, from the outputs of a notebook that is not trusted. The
    caller labels the image for screen readers.

    Args:
        svg: HTML text with SVG elements.
        style: the CSS style of the images.
    """
    return "".join(
        f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(element.encode()).decode()}" style="{style}">'
        for element in re.findall(r"<svg.*?</svg>", svg, re.DOTALL)
    )
