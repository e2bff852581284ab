"""Reads notebooks for the docs site, with their Plotly figures as figures that can be zoomed.

MyST-NB shows of an output what it knows best, which for a figure is a still picture or its text. Here such
an output becomes an element with the figure as JSON, which `static/figures.js` hands to the one copy of
Plotly in the site.
"""

from __future__ import annotations

import gzip
import html
import json
from pathlib import Path
from typing import Any

import nbformat
from sphinx.application import Sphinx

from nbgpu.package import STATIC

FIGURE = "application/vnd.plotly.v1+json"
_PLOTLY = "plotly-basic.min.js"


def read(text: str) -> Any:
    """Read a notebook, with elements in place of its figures."""
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if FIGURE in output.get("data", {}):
                output.data = nbformat.from_dict({"text/html": _element(output.data)})
    return notebook


def _element(data: Any) -> str:
    """The element of a figure. Without scripts a page shows the still picture or the text in it."""
    figure = {name: data[FIGURE].get(name, {}) for name in ("data", "layout", "config")}
    # A name with '</script' would end the element in the middle of a string.
    drawn = json.dumps(figure).replace("<", "\\u003c")
    text = html.escape(str(data.get("text/plain", "a figure")))
    still = data.get("text/html") or data.get("image/svg+xml") or f"<pre>{text}</pre>"
    return (
        f'<div class="nbgpu-figure" role="img" aria-label="{text}">'
        f'<script type="application/json">{drawn}</script><noscript>{still[still.find("<svg") if "<svg" in still else 0 :]}'
        "</noscript></div>"
    )


def write_plotly(app: Sphinx, problem: Exception | None) -> None:
    """Put Plotly into the built site, from the wheel's own copy."""
    if problem is None and app.builder.format == "html":
        packed = (STATIC / f"{_PLOTLY}.gz").read_bytes()
        (Path(app.outdir) / "_static" / _PLOTLY).write_bytes(gzip.decompress(packed))
