"""Run a cell that the person sends after pressing Stop, but not the cells that were queued before.

When a cell ends in an error, ipykernel aborts all cells that have arrived by then, without a message. That is
right for cells that were sent before Stop, as by "Run All". But after Stop it takes up to a second until all
ranks are back, and a cell that the person runs during that time would be aborted too.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell

_NOTICED_AFTER_S = 0.5
"""The delay with which a kernel on a busy host notices Stop. Nobody runs a cell and stops it in less time."""

_COMPARISON_PERIOD_S = 1.0
"""The least time between two comparisons of the clocks, so that many short cells do not all compare them."""

_compared_mono_s = -_COMPARISON_PERIOD_S
_clock_offset_s: float | None = None
"""An upper bound of the kernel's time minus the page's time: the least difference, over all requests, between
the arrival by the kernel's clock and the sending by the page's clock."""


def note_request() -> None:
    """Compare the kernel's clock with the page's, by the time at which the cell that begins now was sent."""
    global _clock_offset_s, _compared_mono_s
    now_mono_s = time.monotonic()
    if now_mono_s - _compared_mono_s < _COMPARISON_PERIOD_S:
        return
    _compared_mono_s = now_mono_s
    kernel = getattr(ipython_shell.current(), "kernel", None)
    if kernel is None or not (sent_s := _sent_s(kernel.get_parent("shell"))):
        return
    offset_s = time.time() - sent_s
    _clock_offset_s = offset_s if _clock_offset_s is None else min(_clock_offset_s, offset_s)


def keep_what_comes_now() -> None:
    """Do not let ipykernel abort the cells that are sent from now on. Call this when the person presses Stop.

    The flag by which ipykernel aborts requests is private. It is changed only where it exists, and a test
    fails if that has no effect.
    """
    shell = ipython_shell.current()
    kernel = getattr(shell, "kernel", None)
    if shell is None or kernel is None or not hasattr(kernel, "_aborting"):
        return
    stopped_s = time.time() - (_clock_offset_s or 0.0) - _NOTICED_AFTER_S
    set_parent = type(kernel).set_parent

    def set_parent_and_keep(ident: Any, parent: Any, channel: str = "shell") -> None:
        # ipykernel calls this method with each request, just before it checks the flag.
        set_parent(kernel, ident, parent, channel)
        if kernel._aborting and (_sent_s(parent) or 0.0) > stopped_s:
            kernel._aborting = False

    def restore(_: Any) -> None:
        shell.events.unregister("pre_run_cell", restore)
        kernel.__dict__.pop("set_parent", None)

    kernel.set_parent = set_parent_and_keep
    # When the next cell runs, ipykernel has stopped aborting. From then on an error aborts the queued cells
    # again, as "Run All" expects.
    shell.events.register("pre_run_cell", restore)


def _sent_s(request: Any) -> float | None:
    """Return the time at which a request was sent, by the page's clock, in seconds since the epoch; None if
    the request has no date."""
    date = request.get("header", {}).get("date")
    # Some versions of jupyter_client do not parse the date.
    if isinstance(date, str):
        date = datetime.fromisoformat(date)
    return date.timestamp() if isinstance(date, datetime) else None
