"""The control panel as a table without controls, for a notebook that is executed without a page and read
afterwards."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from nbgpu.config import settings_beside, settings_of
from nbgpu.config.settings import control_fields


def page(recipe: str, given: Mapping[str, Any]) -> str:
    """The settings of a recipe by group, with their values, as HTML.

    Args:
        recipe: the workload.
        given: the values that are given in place of defaults, such as the preset.
    """
    values = settings_beside(recipe, given)
    groups: dict[str, list[str]] = {}
    for group, name, _ in control_fields(settings_of(recipe)):
        groups.setdefault(group, []).append(
            f"{html.escape(name)}&nbsp;<b>{html.escape(_in_words(values[name]))}</b>"
        )
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left;vertical-align:top">{html.escape(group)}</th>'
        f'<td style="text-align:left">{" · ".join(settings)}</td></tr>'
        for group, settings in groups.items()
    )
    return (
        f"<p>The controls of {html.escape(recipe)}, as they were when this cell ran. Run it in JupyterLab to use them. "
        f"{html.escape(in_code(recipe, given))}</p>"
        f"<table>{rows}</table>"
    )


def in_code(recipe: str, given: Mapping[str, Any]) -> str:
    """A sentence with the call that trains with these settings, for a page that shows no widgets."""
    arguments = ", ".join([f'"{recipe}"', *(f'{name}="{value}"' for name, value in given.items())])
    return f"In code: run = nbgpu.current().train({arguments}), with any setting by name; run.panel(), run.stop()"


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ("", ()):
        return "–"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
