"""What ranks print and display after their cell: in a thread, a task or a forked child that outlives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextvars import copy_context

from nbgpu.client.cells.outputs import CellOutput
from nbgpu.client.engines.cell_replies import Arrivals, Message

_UPDATE_PERIOD_S = 0.1
_QUIET_S = 1.0
"""After this time in which nothing came, a line that is not complete is shown, too."""


class LateOutput:
    """Shows messages that come once their cell is over, below that cell.

    As in a plain kernel they are shown at once, also while another cell runs. So a thread shows them, and
    lives as long as something comes. Make the object while the cell runs: ipykernel knows from the context
    below which cell it shows something; before version 6.29 it is the cell that runs.

    Args:
        max_lines: the number of lines to show, as in `CellOutput`.
    """

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._context = copy_context()
        self._lock = threading.Lock()
        self._arrivals: Arrivals | None = None
        """What has come; None while nothing is shown."""

    def show(self, rank: int, ranks: Collection[int], message: Message) -> None:
        """Show a message that one of the ranks has sent after its cell; start the thread if none shows
        any."""
        with self._lock:
            if self._arrivals is None:
                self._arrivals = Arrivals()
                show = self._context.copy().run
                threading.Thread(
                    target=show, args=(self._show_until_quiet, ranks, self._arrivals), daemon=True
                ).start()
            self._arrivals.add(rank, message)

    def _show_until_quiet(self, ranks: Collection[int], arrivals: Arrivals) -> None:
        """Show what arrives, until nothing has come for a second."""
        # The widget of a cell's text cannot be made on this thread.
        output = CellOutput(arrivals, ranks, self._max_lines, has_view=False)
        newest_s = time.monotonic()
        while True:
            with self._lock:
                if not arrivals.are_empty:
                    newest_s = time.monotonic()
                elif time.monotonic() - newest_s > _QUIET_S:
                    self._arrivals = None
                    break
            output.show_new()
            time.sleep(_UPDATE_PERIOD_S)
        output.close()
