"""The live panel of a sweep or a study: its table and chart, in the widget that also shows a cell's text.

Of the messages in `live_text.py` the panel uses 'ready', 'snapshot', 'end', 'bundle' and 'stored'. If a page
does not load the widget, or if there is no page, the panel is an output that is replaced every few seconds.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from IPython.display import display, update_display

from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend
from nbgpu.text.html import as_image
from nbgpu.ui.cell import stop_button
from nbgpu.ui.cell.live_text import HtmlWidget
from nbgpu.ui.slot import display_in, new_slot, require_notebook, slot_metadata

PERIOD_S = 1.0
"""The period in which a widget is updated."""
OUTPUT_PERIOD_S = 3.0
"""The period in which an output is replaced where there is no widget."""
PAGE_PATIENCE_S = 5.0
"""If no page has loaded the widget after this time, the panel goes on as an output."""
_DRAWING_SHARE = 0.1
"""The largest share of the kernel's time that is spent on drawing."""
_OLDEST_PICTURE_S = 5.0
"""The greatest age of the picture. The first drawing takes seconds of imports, and the next one must not wait
ten times as long."""


class Work(Protocol):
    """A run, a sweep or a study."""

    def on_end(self, callback: Callable[[Any], None]) -> None:
        """Call back at the end, or at once if the work is over."""
        ...


class Followed(Work, Protocol):
    """A sweep or a study."""

    @property
    def over(self) -> bool: ...

    def describe(self) -> str:
        """One line about the progress."""
        ...

    def stop(self) -> None: ...


def follow(work: Work, period_s: Callable[[], float], update: Callable[[bool], None]) -> None:
    """Call `update(False)` periodically on a thread until the work is over, and then `update(True)` once.

    Args:
        work: a run, a sweep or a study.
        period_s: returns the time from one call to the next, in seconds.
        update: called with whether this is the last call.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(period_s()):
            update(False)

    def on_end(_: Any) -> None:
        ended.set()
        thread.join()
        update(True)

    thread = threading.Thread(target=repeat, name="nbgpu-panel", daemon=True)
    thread.start()
    work.on_end(on_end)


class View(Protocol):
    """The functions that show a sweep, or a study; a module implements them."""

    def chart(self, followed: Any) -> Any:
        """Return the data of the chart; a new picture is drawn if they differ from the last."""
        ...

    def svg(self, followed: Any) -> str:
        """Return the chart as an element of a page; empty where there is nothing to draw."""
        ...

    def page(self, followed: Any, picture: str) -> str:
        """Return everything as HTML, with the chart that `svg` returned."""
        ...

    def text(self, followed: Any) -> str:
        """Return everything as plain text."""
        ...


def bundle(followed: Any, view: View, picture: str | None = None) -> dict[str, Any]:
    """The output that stays in the notebook: table and chart as HTML, and the table as text."""
    drawn = view.svg(followed) if picture is None else picture
    return {"text/html": view.page(followed, as_image(drawn)), "text/plain": view.text(followed)}


class FollowedPanel:
    """The panel of a sweep or a study that goes on.

    Args:
        followed: the sweep or the study.
        view: the functions that show it.
        widget: the widget in the page; None for an output that is replaced.
        slot: the display_id of the output that gets the picture at the end.
        remove_button: called at the end.
    """

    def __init__(
        self,
        followed: Followed,
        view: View,
        widget: HtmlWidget | None,
        slot: str,
        remove_button: Callable[[], None],
    ) -> None:
        """Make the panel; `start` begins to update it once the widget is displayed."""
        self._followed = followed
        self._view = view
        self._widget = widget
        self._slot = slot
        self._remove_button = remove_button
        self._lock = threading.RLock()
        self._page_is_ready = False
        self._displayed_mono_s = time.monotonic()
        self._html = ""
        self._picture = ""
        self._drawn: Any = None
        """The data that `_picture` shows."""
        self._next_drawing_mono_s = 0.0
        self._over = False
        if widget is not None:
            widget.on_msg(self._on_page_message)

    def start(self) -> None:
        """Update the panel until the end."""
        follow(self._followed, lambda: OUTPUT_PERIOD_S if self._widget is None else PERIOD_S, self._update)

    def _update(self, last: bool) -> None:
        """Send the page the new state, if it has changed. If the page does not load the widget, the output
        takes its place."""
        if last:
            self._remove_button()
        page = self._draw(last)
        with self._lock:
            if last:
                self._finish(page)
                return
            if self._widget is not None and not self._page_is_ready:
                if time.monotonic() - self._displayed_mono_s <= PAGE_PATIENCE_S:
                    return
                self._widget.close()
                self._widget = None
            if page == self._html:
                return
            self._html = page
            if self._widget is None:
                update_display(self._bundle(), raw=True, display_id=self._slot)
            else:
                self._widget.send({"type": "snapshot", "html": page})

    def _draw(self, last: bool = False) -> str:
        """Return the present page. Its chart may be a few seconds old, because drawing takes long; at the end
        it is new."""
        begun_mono_s = time.monotonic()
        if last or begun_mono_s >= self._next_drawing_mono_s:
            drawn = self._view.chart(self._followed)
            if drawn != self._drawn:
                self._picture = self._view.svg(self._followed)
                self._drawn = drawn
                ended_mono_s = time.monotonic()
                took_s = ended_mono_s - begun_mono_s
                self._next_drawing_mono_s = ended_mono_s + min(took_s / _DRAWING_SHARE, _OLDEST_PICTURE_S)
        return self._view.page(self._followed, self._picture)

    def _bundle(self) -> dict[str, Any]:
        return bundle(self._followed, self._view, self._picture)

    def _finish(self, page: str) -> None:
        """Replace the live output with the last table and chart, which stay."""
        self._over = True
        self._html = page
        metadata = slot_metadata(self._slot, self._slot)
        update_display(self._bundle(), metadata=metadata, raw=True, display_id=self._slot)
        if self._widget is not None:
            # A page that was reloaded no longer knows the display, and asks for the picture itself.
            self._widget.send({"type": "end"})

    def _on_page_message(self, _: Any, content: dict[str, Any], buffers: list[bytes]) -> None:
        """Answer a message of the page; `live_text.py` lists them."""
        with self._lock:
            widget = self._widget
            if widget is None:
                return
            match content.get("type"):
                case "ready":
                    self._page_is_ready = True
                    self._html = self._html or self._draw()
                    widget.send({"type": "snapshot", "html": self._html})
                    if self._over:
                        widget.send({"type": "end"})
                case "bundle":
                    metadata = slot_metadata(self._slot, self._slot)
                    widget.send({"type": "bundle", "data": self._bundle(), "metadata": metadata})
                case "stored":
                    widget.close()
                    self._widget = None


def show(followed: Followed, view: View, instead: str, tooltip: str) -> None:
    """Display a live panel, or the table and the chart of a sweep or a study that is over.

    Args:
        followed: the sweep or the study.
        view: the functions that show it.
        instead: the calls that a script can use in place of the panel.
        tooltip: the effect of the Stop button.

    Raises:
        RunError: there is no IPython to display anything.
    """
    require_notebook(instead)
    slot = new_slot()
    if followed.over:
        display(bundle(followed, view), raw=True)
        return
    if not has_frontend():
        display({"text/plain": followed.describe()}, raw=True, display_id=slot)
        FollowedPanel(followed, view, None, slot, lambda: None).start()
        return
    widget = HtmlWidget(key=uuid.uuid4().hex, slot=slot)
    answer_while_busy(widget)
    panel = FollowedPanel(followed, view, widget, slot, stop_button.offer(followed.stop, tooltip))
    display_in(slot, widget, text=followed.describe())
    panel.start()
