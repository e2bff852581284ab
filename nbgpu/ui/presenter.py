"""Shows the client's runs, sweeps, studies and cells. This module implements the protocols `Presenter` and
`CellPresenter` of `client/presenting.py`.

The widgets are imported when one is shown, because that takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbgpu.client.cells.outputs import TextView
    from nbgpu.client.runs.run import Run
    from nbgpu.client.scaling.cell_study import CellStudy
    from nbgpu.client.scaling.study import Study
    from nbgpu.client.sweeps.sweep import Sweep
    from nbgpu.run_folder.predictions import Progress


def show_run(run: Run) -> None:
    """Display the folded plan of a run, its live panel, and its pictures if it has some; or the curves of a
    run that is over."""
    from nbgpu.ui.run import panel, picture_view
    from nbgpu.ui.run.plan_view import PlanView

    if run.over:
        panel.show(run)
    else:
        panel.show(run, PlanView(run).refresh)
        if run.config.LIVE_PICTURES:
            picture_view.show(run)


def describe_run(run: Run) -> str:
    """Return one line about the progress of a run: its state, step, epoch, losses, throughput, time left."""
    from nbgpu.ui.run import wording

    return wording.summary(run.info, run.status, run.statuses())


def show_result(run: Run, result: Mapping[str, Any]) -> None:
    """Display a run's result: its sentence, its table and its pictures."""
    from nbgpu.ui.run import result_view

    result_view.show(run, result)


def prepare_report() -> None:
    """Import the modules that draw a report."""
    import_module("nbgpu.ui.run.snapshot")


def report_run(run: Run) -> None:
    """Write `report.html` into the folder of a run."""
    from nbgpu.ui.run.snapshot import write_report

    write_report(run)


def begin_prediction(title: str) -> Callable[[Progress], None]:
    """Display a line about the progress of a prediction, and return the function that updates it."""
    from nbgpu.ui.prediction import line

    return line.begin(title)


def show_sweep(sweep: Sweep) -> None:
    """Display the live panel of a sweep, or the table and curves of a sweep that is over."""
    from nbgpu.ui import followed
    from nbgpu.ui.sweep import view

    tooltip = "Stop all runs of the sweep, each with a checkpoint; the sweep can be resumed"
    followed.show(sweep, view, "sweep.describe() and sweep.table()", tooltip)


def report_sweep(sweep: Sweep) -> None:
    """Write `report.html` into the folder of a sweep."""
    from nbgpu.ui import reports

    reports.write_sweep(sweep)


def show_study(study: Study) -> None:
    """Display the live panel of a study, or the table and charts of a study that is over."""
    from nbgpu.ui import followed
    from nbgpu.ui.study import view

    tooltip = "End after the current step. Measured points stay, and study.resume() goes on"
    followed.show(study, view, "study.describe() and study.frame()", tooltip)


def report_study(study: Study) -> None:
    """Write `report.html` into the folder of a study."""
    from nbgpu.ui import reports

    reports.write_study(study)


def figure_of_study(study: Study) -> Any:
    """Return the charts of a study as a Plotly figure."""
    from plotly.graph_objects import Figure

    from nbgpu.ui.study.view import plotly_figure

    drawn = plotly_figure(study)
    return Figure(data=drawn["data"], layout=drawn["layout"])


def bundle_of_cell_study(study: CellStudy) -> dict[str, Any]:
    """Return the charts and the table of a cell's study as a MIME bundle."""
    from nbgpu.ui import followed
    from nbgpu.ui.study import view

    return followed.bundle(study, view)


def text_of_devices() -> str:
    """The cards of the devices, as lines."""
    from nbgpu.ui.devices import top

    return top.as_text()


def open_text(ranks: Sequence[int], live: bool) -> TextView | None:
    """Make a view for the text of these ranks; None if no page shows it, or if the kernel cannot hear during
    the cell whether a page has loaded it."""
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
    """Show a Stop button under the running cell; return a function that removes it."""
    from nbgpu.ui.cell import stop_button

    return stop_button.offer(stop)
