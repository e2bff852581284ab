"""The charts of what nbgpu itself measures of a rank: one line each in `system_charts.json`.

The live panel gets the lines as they are (widgets/src/charts.ts draws them); the report and the picture that
stays in the notebook are drawn from the same ones (`charts.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_FILE = Path(__file__).with_name("system_charts.json")
LINES: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
"""The charts as the page gets them."""


@dataclass(frozen=True)
class SystemChart:
    """One line of `system_charts.json`."""

    id: str
    button: str
    """The label of the panel's button that shows the chart."""
    title: str
    unit: str
    lines: list[tuple[str, ...]]
    """For each line of a rank the name of its series, its style ('solid', 'dash' or 'dot'), and a label where
    a rank has several lines."""
    worse: Literal["more", "less"]
    """Which values mark the worst rank."""
    divisor: float = 1.0
    """The charted unit, in the unit that ranks record."""
    at_first: bool = False
    """Whether the panel shows the chart before anybody asks for it."""
    in_report: bool = False
    may_be_logarithmic: bool = False
    top: float | None = None
    """The upper end of the axis; None where the values determine it."""
    ceiling: Literal["", "memory_bytes"] = ""
    """The property of a GPU to draw as a limit."""
    is_simulated: bool = False
    """Whether a simulated link changes what is measured, so that the title names the link."""


SYSTEM_CHARTS = [SystemChart(**line) for line in LINES]
