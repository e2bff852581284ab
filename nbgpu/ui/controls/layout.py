"""The layout of fields in groups, and the HTML of messages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

import ipywidgets as w
from pydantic import BaseModel

from nbgpu.config.settings import control_fields
from nbgpu.ui.controls.fields import Field

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


def grouped(model: type[BaseModel], widgets: Mapping[str, w.Widget]) -> dict[str, list[w.Widget]]:
    """The widgets by the group of their settings.

    Args:
        model: the model of the settings.
        widgets: the widgets by the names of their settings.
    """
    groups: dict[str, list[w.Widget]] = {}
    for group, name, _ in control_fields(model):
        if name in widgets:
            groups.setdefault(group, []).append(widgets[name])
    return groups


def problems_text(fields: Mapping[str, Field], problems: Mapping[str, str]) -> str:
    """A message with a line for each field that has a problem, by its label."""
    lines = [f"{fields[name].label}: {problem}" for name, problem in problems.items()]
    return "\n".join(["Correct this first.", *lines])


def message_html(text: str, is_error: bool = False) -> str:
    """The HTML of a message to the person."""
    role = "alert" if is_error else "status"
    color = "var(--jp-error-color1, #d32f2f)" if is_error else "inherit"
    style = f"white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.4;color:{color}"
    return f'<div role="{role}" style="{style}">{html.escape(text)}</div>'
