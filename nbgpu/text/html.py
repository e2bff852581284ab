"""Text and charts as HTML that stays in a notebook.

A page breaks plain text in the middle of words, so text has an HTML form.
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
    """Return plain text as HTML: sentences are broken between words, and the lines of tables stay whole and
    scroll.

    Lines with several blanks within them belong to a table, as `text.tables.aligned` makes them.
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
    """Return the text of an object as HTML; a class that prints as text takes this as its `_repr_html_`."""
    return as_html(str(self))


def labelled(rows: list[tuple[str, str]]) -> str:
    """Return names with their values as HTML, in two columns; the second wraps between words."""
    cells = "".join(
        f'<tr style="background:none"><td style="{_LABEL}">{html.escape(name)}</td>'
        f'<td style="{_VALUE}">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><tbody>{cells}</tbody></table>"


def as_image(svg: str, style: str = "width:100%") -> str:
    """Return HTML in which each SVG element is an image in this style; empty if there is no SVG element.

    JupyterLab takes SVG elements out of the HTML of a notebook that somebody else ran, and leaves their
    words. Images stay. The caller labels the image for screen readers.
    """
    return "".join(
        f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(element.encode()).decode()}" style="{style}">'
        for element in re.findall(r"<svg.*?</svg>", svg, re.DOTALL)
    )
