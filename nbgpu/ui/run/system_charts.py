"""The charts of numbers that nbgpu itself measures on each rank. Each chart is an entry of
`system_charts.json`.

The live panel gets the entries unchanged (widgets/src/charts.ts draws them). The report and the picture that
stays in the notebook are drawn from the same entries (`charts.py`).
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
    """For each line of a rank: the name of its series, its style ('solid', 'dash' or 'dot'), and a label if a
    rank has several lines."""
    worse: Literal["more", "less"]
    """Whether larger or smaller values mark the worst rank."""
    divisor: float = 1.0
    """The recorded values are divided by this number to get the charted unit."""
    at_first: bool = False
    """Whether the panel shows the chart from the beginning."""
    in_report: bool = False
    may_be_logarithmic: bool = False
    top: float | None = None
    """The upper end of the axis; None to fit the values."""
    ceiling: Literal["", "memory_bytes"] = ""
    """The property of a GPU that is drawn as a limit."""
    is_simulated: bool = False
    """Whether a simulated link affects the values, so that the title names the link."""


SYSTEM_CHARTS = [SystemChart(**line) for line in LINES]
