"""How fields are put into groups on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ipywidgets as w
from pydantic import BaseModel

from nbgpu.config.settings import control_fields

GRID = {
    "grid_template_columns": "repeat(auto-fill, minmax(min(215px, 100%), 1fr))",
    "grid_gap": "4px 16px",
    "width": "100%",
    "align_items": "flex-start",
}


def grid(members: Iterable[w.Widget]) -> w.GridBox:
    """Fields side by side, in as many columns as the page has room for."""
    return w.GridBox(list(members), layout=GRID)


def grouped(model: type[BaseModel], made: Mapping[str, w.Widget]) -> dict[str, list[w.Widget]]:
    """The widgets of a model's fields by group; those that were not made are left out."""
    groups: dict[str, list[w.Widget]] = {}
    for group, name, _ in control_fields(model):
        if name in made:
            groups.setdefault(group, []).append(made[name])
    return groups
