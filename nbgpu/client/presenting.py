"""The interface by which the client shows runs, sweeps, studies and cells. `nbgpu.ui` implements it, and sets
`presenter` and `cell_presenter`.

The client does not import the widgets, and works without them: while one of the two is None, nothing is
shown. Runs, sweeps and studies have the type Any here, because their modules import this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nbgpu.errors import RunError


class Presenter(Protocol):
    """Shows runs, predictions, sweeps and studies to a person."""

    def show_run(self, run: Any) -> None:
        """Display the live panel of a run."""
        ...

    def describe_run(self, run: Any) -> str:
        """Return one line about the progress of a run."""
        ...

    def show_result(self, run: Any, result: Mapping[str, Any]) -> None:
        """Display the result of a run."""
        ...

    def prepare_report(self) -> None:
        """Do in advance what would take `report_run` a second at its first call. This is called on a thread
        while a run trains."""
        ...

    def report_run(self, run: Any) -> None:
        """Write `report.html` into the folder of a run that is over."""
        ...

    def begin_prediction(self, title: str) -> Callable[[Any], None]:
        """Show a line about the progress, and return the function that updates it."""
        ...

    def show_sweep(self, sweep: Any) -> None:
        """Display the live panel of a sweep."""
        ...

    def report_sweep(self, sweep: Any) -> None:
        """Write `report.html` into the folder of a sweep that is over."""
        ...

    def show_study(self, study: Any) -> None:
        """Display the live panel of a study."""
        ...

    def report_study(self, study: Any) -> None:
        """Write `report.html` into the folder of a study that is over."""
        ...

    def figure_of_study(self, study: Any) -> Any:
        """Return the study's charts as a Plotly figure."""
        ...


class CellPresenter(Protocol):
    """Shows what belongs to the running cell of a notebook."""

    def open_text(self, ranks: Sequence[int], live: bool) -> Any:
        """Make a view for the text of these ranks, live or of a cell that is over; None if no page can show
        it."""
        ...

    def offer_stop(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Show a Stop button under the running cell, which calls `stop` on another thread; return a function
        that removes the button."""
        ...

    def bundle_of_cell_study(self, study: Any) -> dict[str, Any]:
        """Return the charts and the table of a cell's study as a MIME bundle."""
        ...

    def text_of_devices(self) -> str:
        """Return the cards of the devices as lines."""
        ...


presenter: Presenter | None = None
cell_presenter: CellPresenter | None = None
"""None in a script, which has no cells."""


def required(what: str, work: str, or_else: str = "") -> Presenter:
    """Return the presenter. Without one, raise a RunError about the action that it would have done.

    Args:
        what: a predicate, such as 'could display a panel'.
        work: what is to be shown: 'run', 'sweep' or 'study'.
        or_else: the end of the message, which names another way.
    """
    if presenter is None:
        raise RunError(f"nothing is connected that {what}. Use the {work} through `import nbgpu`{or_else}")
    return presenter
