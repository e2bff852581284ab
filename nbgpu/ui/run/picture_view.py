"""Pictures of what a run searches for, which change below its panel while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

from nbgpu.protocol.records import Event
from nbgpu.ui.run.history import Series, SeriesKey
from nbgpu.ui.run.html_parts import pictures
from nbgpu.ui.run.panel import Follower
from nbgpu.ui.slot import new_slot

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run

_PERIOD_S = 1.0


def bundle(event: Event | None) -> dict[str, Any]:
    """The pictures of an event side by side, and a text that names them."""
    if event is None:
        return {"text/html": "", "text/plain": "no pictures yet"}
    images = event.detail["images"]
    captioned = {f"step {event.step}: {caption}": source for caption, source in images.items()}
    return {"text/html": pictures(captioned), "text/plain": f"step {event.step}: {', '.join(images)}"}


class PictureView:
    """Passes on the newest pictures of a run, on a thread of its own, until the run is over.

    Args:
        run: the run to follow.
        show: called with a bundle of HTML and text each time.
    """

    def __init__(self, run: Run, show: Callable[[dict[str, Any]], None]) -> None:
        self._show = show
        self._shown: Event | None = None
        self._follower = Follower(run, _PERIOD_S, self._tell)
        self._follower.start()

    def _tell(self, new: dict[SeriesKey, Series], marks: list[Event], last: bool) -> None:
        newest = self._follower.history.pictures
        if newest is not self._shown:
            self._shown = newest
            self._show(bundle(newest))


def show(run: Run) -> None:
    """Display the newest pictures of a run. The last ones stay in the notebook."""
    slot = new_slot()
    display(bundle(None), raw=True, display_id=slot)
    PictureView(run, lambda pictures: update_display(pictures, raw=True, display_id=slot))
