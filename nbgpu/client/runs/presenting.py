"""How a run is shown to a person, as far as the client asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run


class Presenter(Protocol):
    """The object that shows runs to a person. The client does not know the widgets; `nbgpu.ui` connects
    them."""

    def show(self, run: Run) -> None:
        """Display the live panel of a run."""
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
