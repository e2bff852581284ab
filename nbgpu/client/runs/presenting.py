"""How a run is shown to a person, as far as the client asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nbgpu.client.ipykernel.progress_line import Progress
from nbgpu.run_folder import checkpoint_files

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
    """Why a run has no result, and what gives it one, as the message of an error."""
    name, status = run.folder.name, run.status
    if not run.over:
        return f"{name} has no result yet: it is {status}. run.wait() waits for the end"
    if never := why_none_can_be_worked_out(run):
        return never
    because = (
        "" if status == "finished" else f", because it {'was stopped' if status == 'stopped' else status}"
    )
    return f"{name} has no result{because}. run.work_out_result() works out that of its newest checkpoint"


def why_none_can_be_worked_out(run: Run) -> str:
    """Why the result of a run that is over cannot be worked out now; empty where it can."""
    name, config, status = run.folder.name, run.config, run.status
    if "work_out_result" in config.UNUSED or (status == "finished" and config.work_out_result):
        return f"{name} has no result: its recipe works none out"
    if not config.telemetry:
        return f"{name} has no result: with telemetry=False nothing is recorded"
    if config.smoke_test:
        return f"{name} has no result, because the smoke test did not come to its end. Start it again"
    newest = checkpoint_files.newest_whole(run.folder, contents=False).checkpoint
    if newest is None or not checkpoint_files.state(newest)["step"]:
        how = "was stopped" if status == "stopped" else status
        return f"{name} has no result, because it {how} before a step was saved"
    return ""
