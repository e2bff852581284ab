"""Text, tables and pictures as HTML, for all pages about runs.

The HTML needs no script. JupyterLab shows it unchanged in a notebook that is not trusted, where it keeps
`class` and `style` attributes, and removes `<style>` and `<script>` elements.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping
from typing import Any


def escape(text: object) -> str:
    return html.escape(str(text))


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as HTML, with all text escaped."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"<td>{value}</td>"
        shown = f"{value:.4g}"
        # Otherwise a narrow page would break the line at the minus of an exponent.
        style = ' style="white-space:nowrap"' if "e" in shown else ""
        return f'<td class="number"{style}>{shown}</td>'
    return f"<td>{escape(value)}</td>"


def picture(caption: str, source: object) -> str:
    """A PNG data URI as a figure with its caption; for any other source, a sentence that names the
    caption."""
    prefix = "data:image/png;base64,"
    try:
        if not (isinstance(source, str) and source.startswith(prefix)):
            raise ValueError(source)
        # Decoding and encoding again leaves nothing in the page but base64.
        clean = base64.b64encode(base64.b64decode(source.removeprefix(prefix))).decode()
    except ValueError:
        return f"<p>{escape(caption)}: this picture is not a PNG as a data URL.</p>"
    return (
        f'<figure style="margin:0"><img src="{prefix}{clean}" alt="{escape(caption)}" style="max-width:100%">'
        f'<figcaption style="opacity:0.75">{escape(caption)}</figcaption></figure>'
    )


def pictures(images: Mapping[str, object]) -> str:
    """Pictures by their captions, side by side, as many as the page has room for."""
    style = "display:flex;flex-wrap:wrap;gap:12px;align-items:flex-end"
    return f'<div style="{style}">{"".join(picture(name, source) for name, source in images.items())}</div>'


def is_table(value: Any) -> bool:
    """Whether a part of a recipe's result is a table: a dict of rows by name, each a dict of cells by
    column."""
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, Mapping) for v in value.values())


def columns_of(rows: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The columns of a table for which `is_table` is true, in the order in which they first appear."""
    return list(dict.fromkeys(column for row in rows.values() for column in row))


def followed_page(
    kind: str, line: str, label: str, picture: str, rows: str, folder: object, notes: str = ""
) -> str:
    """The page of a sweep or a study.

    Args:
        kind: 'sweep' or 'study'.
        line: the progress in one line.
        label: the name of the picture for screen readers.
        picture, rows, notes: the picture, the table and the notes as HTML.
        folder: the folder of the sweep or study; None for one that is not kept.
    """
    name = f"nbgpu-{kind}"
    drawn = f'<div role="img" aria-label="{label}" class="{name}-picture">{picture}</div>' if picture else ""
    place = f'<p class="{name}-place">{escape(folder)}</p>' if folder else ""
    return (
        f'<div class="{name}"><style>{_FOLLOWED_CSS.replace("KIND", name)}</style>'
        f'<p class="{name}-line">{escape(line)}</p>{drawn}<div class="{name}-rows">{rows}</div>{notes}{place}</div>'
    )


_FOLLOWED_CSS = """
.KIND { font-size: 13px; }
.KIND .KIND-line { font-weight: 600; margin: 0 0 6px; }
.KIND .KIND-picture { display: flex; flex-wrap: wrap; gap: 10px; }
.KIND .KIND-picture > * { flex: 1 1 380px; max-width: 520px; min-width: 0; }
.KIND .KIND-rows { max-height: 420px; overflow: auto; }
.KIND table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.KIND th, .KIND td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid rgba(128,128,128,.3); }
.KIND tbody th { font-weight: normal; }
.KIND .KIND-gap, .KIND .KIND-error { background: rgba(255,0,0,.13); white-space: pre-wrap; }
.KIND .KIND-place { color: #7b7b7b; margin: 6px 0 0; }
""".strip()
