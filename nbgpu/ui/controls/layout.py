"""The layout of fields in groups, and the HTML of messages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

import ipywidgets as w
from pydantic import BaseModel

from nbgpu.config.settings import control_fields

WRAPPED = {"flex_flow": "row wrap", "align_items": "center"}
"""The layout of buttons side by side."""
_GRID = {"grid_gap": "2px 10px", "width": "100%", "align_items": "flex-start"}


def grid(members: Iterable[w.Widget], fills: bool = False) -> w.GridBox:
    """Fields side by side, in as many columns as the page has room for.

    Args:
        members: the fields.
        fills: whether a few fields share the whole width, in place of leaving columns empty.
    """
    columns = f"repeat({'auto-fit' if fills else 'auto-fill'}, minmax(min(175px, 100%), 1fr))"
    return w.GridBox(list(members), layout={**_GRID, "grid_template_columns": columns})


def grouped(model: type[BaseModel], made: Mapping[str, w.Widget]) -> dict[str, list[w.Widget]]:
    """The widgets of a model's fields by group; those that were not made are left out."""
    groups: dict[str, list[w.Widget]] = {}
    for group, name, _ in control_fields(model):
        if name in made:
            groups.setdefault(group, []).append(made[name])
    return groups


def said(text: str, is_error: bool = False) -> str:
    """The HTML of a message to the person."""
    role = "alert" if is_error else "status"
    color = "var(--jp-error-color1, #d32f2f)" if is_error else "inherit"
    style = f"white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.4;color:{color}"
    return f'<div role="{role}" style="{style}">{html.escape(text)}</div>'
