"""How fields are put into groups on the page."""

from __future__ import annotations

import html
from collections.abc import Mapping

import ipywidgets as w
from pydantic import BaseModel

from nbgpu.config.settings import control_fields

GRID = {"grid_template_columns": "repeat(auto-fill, minmax(310px, 1fr))", "width": "100%"}


def heading(text: str) -> w.Widget:
    return w.HTML(f'<h4 style="margin:4px 0">{html.escape(text)}</h4>')


def grouped(model: type[BaseModel], made: Mapping[str, w.Widget]) -> dict[str, list[w.Widget]]:
    """The widgets of a model's fields by group."""
    groups: dict[str, list[w.Widget]] = {}
    for group, name, _ in control_fields(model):
        groups.setdefault(group, []).append(made[name])
    return groups
