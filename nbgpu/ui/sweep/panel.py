"""The live panel of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbgpu.ui import followed
from nbgpu.ui.sweep import view as sweep_view

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep


class SweepView:
    """What the panel shows of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep

    @property
    def over(self) -> bool:
        return self._sweep.over

    def describe(self) -> str:
        return self._sweep.describe()

    def drawn(self) -> Any:
        title, lines = sweep_view.chart(self._sweep)
        return title, [(line.number, line.is_best, line.curve) for line in lines]

    def svg(self) -> str:
        return sweep_view.svg(self._sweep)

    def page(self, picture: str) -> str:
        return sweep_view.page(self._sweep, picture)

    def text(self) -> str:
        return sweep_view.text(self._sweep)

    def stop(self) -> None:
        self._sweep.stop()

    def on_end(self, callback: Callable[[Any], None]) -> None:
        self._sweep.on_end(callback)


def show(sweep: Sweep) -> None:
    """Display the live panel of a sweep, or the table and chart of a sweep that is over.

    Raises:
        RunError: there is no IPython to display anything.
    """
    tooltip = "Stop all runs of the sweep, each with a checkpoint; the sweep can be resumed"
    followed.show(SweepView(sweep), "sweep.describe() and sweep.table()", tooltip)
