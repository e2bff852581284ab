"""The live panel of a sweep or a study, with its table and chart in the same small widget that shows a cell's
text.

Of the messages in `live_text.py` it needs 'snapshot', 'end' and 'bundle'. If a page does not load the widget,
or if there is no page, the panel is an output that is replaced every few seconds.
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
"""The share of the kernel's time that may go into drawing."""
_OLDEST_PICTURE_S = 5.0
"""The greatest age of the picture. The first drawing takes seconds of imports, and the next one must not wait
ten times as long."""


class Followed(Protocol):
    """A sweep or a study."""

    @property
    def over(self) -> bool: ...

    def describe(self) -> str:
        """One line about the progress."""
        ...

    def stop(self) -> None: ...

    def on_end(self, callback: Callable[[Any], None]) -> None:
        """Call back at the end, or at once where that has come."""
        ...


class View(Protocol):
    """The functions that show a sweep, or a study; a module implements them."""

    def chart(self, followed: Any) -> Any:
        """Return what the chart shows; a new picture is drawn where this differs from the last."""
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
    """Follows a sweep or a study on a thread of its own.

    Args:
        followed: the sweep or the study.
        view: the functions that show it.
        widget: the widget in the page; None for an output that is replaced.
        slot: the display_id of the output that gets the picture at the end.
        take_button_away: called at the end.
    """

    def __init__(
        self,
        followed: Followed,
        view: View,
        widget: HtmlWidget | None,
        slot: str,
        take_button_away: Callable[[], None],
    ) -> None:
        """Make the panel without starting its thread; `start` does so once the widget is displayed."""
        self._followed = followed
        self._view = view
        self._widget = widget
        self._slot = slot
        self._take_button_away = take_button_away
        self._lock = threading.RLock()
        self._page_is_ready = False
        self._shown_mono_s = time.monotonic()
        self._html = ""
        self._picture = ""
        self._drawn: Any = None
        self._next_drawing_mono_s = 0.0
        self._ended = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._follow, name="nbgpu-panel", daemon=True)
        if widget is not None:
            widget.on_msg(self._on_page_message)

    def start(self) -> None:
        self._thread.start()
        self._followed.on_end(self._end)

    def _follow(self) -> None:
        while not self._ended.wait(self._period_s):
            self._show()

    @property
    def _period_s(self) -> float:
        return OUTPUT_PERIOD_S if self._widget is None else PERIOD_S

    def _show(self) -> None:
        """Send the page the new state, if it has changed. Where the page does not load the widget, the output
        takes its place."""
        page = self._draw()
        with self._lock:
            if self._widget is not None and not self._page_is_ready:
                if time.monotonic() - self._shown_mono_s <= PAGE_PATIENCE_S:
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
        """Return the present page. Its chart may be a little older, because drawing it takes long, except for
        the last one."""
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

    def _end(self, _: Any) -> None:
        """Draw the last state, and replace the live output with the table and the chart that stay. `on_end`
        calls this."""
        self._ended.set()
        self._thread.join()
        self._take_button_away()
        page = self._draw(last=True)
        with self._lock:
            self._over = True
            self._html = page
            update_display(
                self._bundle(),
                metadata=slot_metadata(self._slot, self._slot),
                raw=True,
                display_id=self._slot,
            )
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
