"""The pictures that a search records, shown below its panel while it goes on."""

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
    """The MIME bundle of an event's pictures, side by side, with a text that names them. None for an event
    stands for no pictures yet."""
    if event is None:
        return {"text/html": "", "text/plain": "no pictures yet"}
    images = event.detail["images"]
    captioned = {f"step {event.step}: {caption}": source for caption, source in images.items()}
    return {"text/html": pictures(captioned), "text/plain": f"step {event.step}: {', '.join(images)}"}


def follow_pictures(run: Run, show: Callable[[dict[str, Any]], None]) -> None:
    """Show the newest pictures of a run until the run is over.

    Args:
        run: the run to follow.
        show: called on a thread with the bundle of the pictures, whenever there are new ones.
    """
    shown: Event | None = None

    def update(new: dict[SeriesKey, Series], marks: list[Event], last: bool) -> None:
        nonlocal shown
        newest = follower.history.pictures
        if newest is not shown:
            shown = newest
            show(bundle(newest))

    follower = Follower(run, _PERIOD_S, update)
    follower.start()


def show(run: Run) -> None:
    """Display the newest pictures of a run. The last ones stay in the notebook."""
    slot = new_slot()
    display(bundle(None), raw=True, display_id=slot)
    follow_pictures(run, lambda data: update_display(data, raw=True, display_id=slot))
