"""How a run is shown to a person, as far as the client asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nbgpu.client.ipykernel.progress_line import Progress

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run


class Presenter(Protocol):
    """The object that shows runs to a person. The client does not know the widgets; `nbgpu.ui` connects
    them."""

    def show(self, run: Run) -> None:
        """Display the live panel of a run."""
        ...

    def describe(self, run: Run) -> str:
        """Return one line about the progress of a run."""
        ...

    def show_result(self, run: Run, result: Mapping[str, Any]) -> None:
        """Display the result of a run."""
        ...

    def prepare(self) -> None:
        """Do the work that would take `report` a second at its first call; this runs on a thread while a run
        trains."""
        ...

    def report(self, run: Run) -> None:
        """Write `report.html` into the folder of a run that is over."""
        ...


def progress_of(run: Run, presenter: Presenter | None) -> Progress:
    """How far a run is, for the line below a cell that waits for it."""
    num_steps = run.info.total_steps
    share = min(status.step for status in run.statuses()) / num_steps if num_steps else None
    return Progress("" if presenter is None else presenter.describe(run), share)


def why_no_result(run: Run) -> str:
    """Why a run has no result, as the message of an error."""
    name, status = run.folder.name, run.status
    if status == "finished":
        return f"{name} has no result: its recipe works none out"
    if run.over:
        return f"{name} has no result, because it {'was stopped' if status == 'stopped' else status}"
    return f"{name} has no result yet: it is {status}. run.wait() waits for the end"
