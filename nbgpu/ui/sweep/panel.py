"""The live panel of a sweep, with its table and chart in the same small widget that shows a cell's text.

Of the messages in `live_text.py` it needs 'snapshot', 'end' and 'bundle'. If a page does not load the widget,
or if there is no page, the panel is an output that is replaced every few seconds.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend
from nbgpu.ui.cell import stop_button
from nbgpu.ui.cell.live_text import HtmlWidget
from nbgpu.ui.slot import display_in, new_slot, require_notebook, slot_metadata
from nbgpu.ui.sweep import view as sweep_view

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep

PERIOD_S = 1.0
OUTPUT_PERIOD_S = 3.0
PAGE_PATIENCE_S = 5.0
_DRAWING_SHARE = 0.1
"""The share of the kernel's time that may go into drawing."""
_OLDEST_PICTURE_S = 5.0
"""The greatest age of the picture. The first drawing takes seconds of imports, and the next one must not wait
ten times as long."""


def bundle(sweep: Sweep, picture: str | None = None) -> dict[str, Any]:
    """The output that stays in the notebook: table and chart as HTML, and the table as text."""
    drawn = sweep_view.svg(sweep) if picture is None else picture
    return {"text/html": sweep_view.page(sweep, drawn), "text/plain": sweep_view.text(sweep)}


class SweepPanel:
    """Follows a sweep on a thread of its own.

    Args:
        sweep: the sweep to show.
        widget: the widget in the page; None for an output that is replaced.
        slot: the display_id of the output that gets the picture at the end.
        take_button_away: called at the end.
    """

    def __init__(
        self, sweep: Sweep, widget: HtmlWidget | None, slot: str, take_button_away: Callable[[], None]
    ) -> None:
        self._sweep = sweep
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
        self._sweep.on_end(self._end)

    def _follow(self) -> None:
        while not self._ended.wait(self._period_s):
            self._show()

    @property
    def _period_s(self) -> float:
        return OUTPUT_PERIOD_S if self._widget is None else PERIOD_S

    def _show(self) -> None:
        """Send the page the new state, if it has changed."""
        page = self._draw()
        with self._lock:
            if page == self._html:
                return
            self._html = page
            if self._widget is None:
                update_display(bundle(self._sweep, self._picture), raw=True, display_id=self._slot)
            elif self._page_is_ready:
                self._widget.send({"type": "snapshot", "html": page})
            elif time.monotonic() - self._shown_mono_s > PAGE_PATIENCE_S:
                self._widget.close()
                self._widget = None

    def _draw(self, last: bool = False) -> str:
        """The present page. Its chart may be a little older, because drawing it takes long."""
        begun_mono_s = time.monotonic()
        if last or begun_mono_s >= self._next_drawing_mono_s:
            title, lines = sweep_view.chart(self._sweep)
            drawn = (title, [(line.number, line.is_best, line.curve) for line in lines])
            if drawn != self._drawn:
                self._picture = sweep_view.svg(self._sweep)
                self._drawn = drawn
                took_s = time.monotonic() - begun_mono_s
                self._next_drawing_mono_s = begun_mono_s + min(took_s / _DRAWING_SHARE, _OLDEST_PICTURE_S)
        return sweep_view.page(self._sweep, self._picture)

    def _end(self, sweep: Sweep) -> None:
        self._ended.set()
        self._thread.join()
        self._take_button_away()
        page = self._draw(last=True)
        with self._lock:
            self._over = True
            self._html = page
            update_display(
                bundle(sweep, self._picture),
                metadata=slot_metadata(self._slot, self._slot),
                raw=True,
                display_id=self._slot,
            )
            if self._widget is not None:
                # A page that was reloaded no longer knows the display, and asks for the picture itself.
                self._widget.send({"type": "end"})

    def _on_page_message(self, _: Any, content: dict[str, Any], buffers: list[bytes]) -> None:
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
                    data = bundle(self._sweep, self._picture)
                    widget.send({"type": "bundle", "data": data, "metadata": metadata})
                case "stored":
                    widget.close()
                    self._widget = None


def show(sweep: Sweep) -> None:
    """Display the live panel of a sweep, or the table and chart of a sweep that is over.

    Raises:
        RunError: there is no IPython to display anything.
    """
    require_notebook("sweep.describe() and sweep.table()")
    slot = new_slot()
    if sweep.over:
        display(bundle(sweep), raw=True)
        return
    if not has_frontend():
        display({"text/plain": sweep.describe()}, raw=True, display_id=slot)
        SweepPanel(sweep, None, slot, lambda: None).start()
        return
    widget = HtmlWidget(key=uuid.uuid4().hex, slot=slot)
    answer_while_busy(widget)
    tooltip = "Stop all runs of the sweep, each with a checkpoint; it can be gone on with"
    panel = SweepPanel(sweep, widget, slot, stop_button.offer(sweep.stop, tooltip))
    display_in(slot, widget, text=sweep.describe())
    panel.start()
