"""The text of a cell while the cell runs, in a widget that gets only the new text.

The page and the kernel exchange these custom messages:

    page -> kernel   {type: 'ready'}             a page has loaded the widget
                     {type: 'chosen', value}     the rank whose text is shown: a number, or 'all'
                     {type: 'bundle'}            the text did not reach my notebook: send it
                     {type: 'stored'}            the notebook has the text: the widget can go
    kernel -> page   {type: 'snapshot', html}    all text so far; sent again to every page that is ready
                     {type: 'more', tail, html, rows, differs}
                                                 new lines of the last block, new blocks after it, and the
                                                 rows below them (lines that may still change)
                     {type: 'end'}               the cell is over: ask for the bundle if it did not come
                     {type: 'bundle', data, metadata}
                                                 the output that stays in the notebook

Nothing here waits for a page's answer. If a page has not loaded the widget after a while, because it does not
support widgets or may not fetch what they need, the text goes to the notebook's own streams.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets
from IPython.display import display, update_display

from nbgpu.client.cells.merging import Block
from nbgpu.client.cells.outputs import Streams
from nbgpu.client.ipykernel.page import RunningCell, answer_while_busy
from nbgpu.package import STATIC
from nbgpu.ui.cell.text_html import ALL, block_html, bundle, differs, joins, lines_html, page
from nbgpu.ui.slot import display_in, new_slot, slot_metadata

_PAGE_PATIENCE_S = 5.0
"""If no page has loaded the widget after this time, the text goes to the notebook's streams."""
_LONGEST_ROW = 500
"""The most characters of a row that may still change; its end is shown."""


class HtmlWidget(anywidget.AnyWidget):
    """A widget that shows HTML from the kernel, and is replaced in the notebook at the end."""

    _esm = STATIC / "text.js"
    key = traitlets.Unicode("").tag(sync=True)
    """An id that tells this widget from all others in a page."""
    slot = traitlets.Unicode("").tag(sync=True)


class LiveText:
    """A view of text that grows. The cell calls it on the main thread, and messages of the page arrive on
    another thread.

    Args:
        ranks: the ranks that run the cell.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Make the widget and display it, with empty text."""
        self._ranks = ranks
        self._lock = threading.RLock()
        self._blocks: list[Block] = []
        self._rows = ""
        self._tail: list[str] = []
        """New lines of the last block that the page has. They have not been sent yet."""
        self._new: list[Block] = []
        """New blocks after that one, which have not been sent yet."""
        self._chosen = ALL
        self._page_is_ready = False
        self._ended = False
        self._streams: Streams | None = None
        """The streams to which the text goes if the page has not loaded the widget."""
        self._slot = new_slot()
        self._widget = HtmlWidget(key=uuid.uuid4().hex, slot=self._slot)
        answer_while_busy(self._widget)
        self._widget.on_msg(self._on_page_message)
        self._cell = RunningCell()
        self._shown_mono_s = time.monotonic()
        # This comes last: the page may answer on another thread as soon as the widget is displayed.
        display_in(self._slot, self._widget, text="")

    def add(self, blocks: Sequence[Block]) -> None:
        """Append lines. The page gets them with the next call of `show_rows`."""
        if self._streams is not None:
            self._streams.add(blocks)
            return
        with self._lock:
            for block in blocks:
                if self._blocks and joins(self._blocks[-1], block):
                    # The page has the beginning of the block, or gets it with the next message.
                    (self._new[-1].texts if self._new else self._tail).extend(block.texts)
                    self._blocks[-1].texts.extend(block.texts)
                else:
                    self._new.append(Block(block.ranks, block.kind, list(block.texts)))
                    self._blocks.append(Block(block.ranks, block.kind, list(block.texts)))

    def show_rows(self, rows: Sequence[Block]) -> None:
        """Send all new text and the rows in one message."""
        if self._streams is not None:
            return
        with self._lock:
            shortened = [Block(row.ranks, row.kind, [t[-_LONGEST_ROW:] for t in row.texts]) for row in rows]
            rows_before, self._rows = self._rows, "".join(map(block_html, shortened))
            if self._page_is_ready and (self._tail or self._new or self._rows != rows_before):
                more = {
                    "type": "more",
                    "tail": f"\n{lines_html(self._tail)}" if self._tail else "",
                    "html": "".join(map(block_html, self._new)),
                    "rows": self._rows,
                    "differs": differs(self._blocks),
                }
                self._widget.send(more)
            # A page that loads the widget later gets everything in its snapshot.
            self._tail, self._new = [], []
            if not self._page_is_ready and time.monotonic() - self._shown_mono_s > _PAGE_PATIENCE_S:
                self._go_on_in_streams()

    def close(self) -> None:
        """End the widget and leave the text in the notebook as an ordinary output; do nothing where the text
        went to the notebook's streams."""
        self._cell.over()
        if self._streams is not None:
            return
        with self._lock:
            self._ended = True
            self._rows = ""
            if self._page_is_ready:
                data, metadata = self._final_output()
                update_display(data, metadata=metadata, raw=True, display_id=self._slot)
                # A page that was reloaded no longer knows the display, and asks for the text itself.
                self._widget.send({"type": "end"})
            else:
                # A page that has not loaded the widget may not update a display either, so this is a new one.
                self._remove_widget()
                display(bundle(self._ranks, self._blocks), raw=True)

    def _final_output(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return bundle(self._ranks, self._blocks, self._chosen), slot_metadata(self._slot, self._slot)

    def _go_on_in_streams(self) -> None:
        """Print all text so far, and from now on, in place of the widget."""
        self._remove_widget()
        self._streams = Streams()
        self._streams.add(self._blocks)

    def _remove_widget(self) -> None:
        update_display({}, raw=True, display_id=self._slot)
        self._widget.close()

    def _on_page_message(self, _: Any, content: dict[str, Any], buffers: list[bytes]) -> None:
        """Answer a message of the page; the module's docstring lists them. While a cell runs, ipykernel calls
        this on the thread of a subshell."""
        with self._lock:
            match content.get("type"):
                case "ready":
                    self._page_is_ready = True
                    html = page(self._ranks, self._blocks, self._rows, self._chosen)
                    self._widget.send({"type": "snapshot", "html": html})
                    # The snapshot contains everything that was to be sent next.
                    self._tail, self._new = [], []
                    if self._ended:
                        self._widget.send({"type": "end"})
                    else:
                        self._cell.say_busy()
                case "chosen":
                    self._chosen = str(content.get("value"))
                case "bundle":
                    data, metadata = self._final_output()
                    self._widget.send({"type": "bundle", "data": data, "metadata": metadata})
                case "stored":
                    self._widget.close()
