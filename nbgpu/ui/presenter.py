"""The client's `Presenter` of runs and of sweeps, and the maker of the views of its cells' text.

It loads the widgets when one is shown, because they take half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbgpu.client.cells.outputs import TextView
    from nbgpu.client.runs.run import Run
    from nbgpu.client.sweeps.sweep import Sweep


def show(run: Run) -> None:
    """Displays the plan of a run, folded, its live panel, and its pictures if it has some; or the curves of one that is over."""
    from nbgpu.ui.run import panel, picture_view
    from nbgpu.ui.run.plan_view import PlanView

    if run.over:
        panel.show(run)
    else:
        panel.show(run, PlanView(run).refresh)
        if run.config.LIVE_PICTURES:
            picture_view.show(run)


def prepare() -> None:
    """Imports what a report is drawn with."""
    import_module("nbgpu.ui.run.snapshot")


def report(run: Run) -> None:
    """Writes `report.html` into the folder of a run."""
    from nbgpu.ui.run.snapshot import write_report

    write_report(run)


def show_sweep(sweep: Sweep) -> None:
    """Displays the live panel of a sweep, or the table and curves of one that is over."""
    from nbgpu.ui.sweep import panel as sweep_panel

    sweep_panel.show(sweep)


def report_sweep(sweep: Sweep) -> None:
    """Writes `report.html` into the folder of a sweep."""
    from nbgpu.ui.sweep.report import write_report

    write_report(sweep)


def open_text(ranks: Sequence[int], live: bool) -> TextView | None:
    """A view for the text of these ranks; None where no page would show it, or could say during a cell that it does."""
    from nbgpu.client.ipykernel import page

    if not page.has_frontend() or page.is_captured():
        return None
    if not live:
        from nbgpu.ui.cell.text_html import StillText

        return StillText(ranks)
    if not page.has_subshells():
        return None
    from nbgpu.ui.cell.live_text import LiveText

    return LiveText(ranks)


def offer_stop(stop: Callable[[], None]) -> Callable[[], None]:
    """Shows a Stop button under the cell that is running; returns what takes it away again."""
    from nbgpu.ui.cell import stop_button

    return stop_button.offer(stop)
