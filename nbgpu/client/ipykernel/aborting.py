"""A cell that is sent after Stop runs, and those that were waiting behind the stopped one do not.

When a cell ends in an error, ipykernel answers 'aborted' to all cells that came by then, and says nothing to
the person. That is right for those that were sent before Stop, as "Run All" does. But to bring all ranks back
takes up to a second, and who presses Stop and then runs the next cell would wonder where it went.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell

_NOTICED_AFTER_S = 0.5
"""On a busy host a kernel notices Stop so much later. Nobody runs a cell and stops it in less."""

_clock_offset_s: float | None = None
"""At most this much later than the page the kernel's clock shows the same moment: the least that a request
took to come, by the two clocks."""


def note_request() -> None:
    """Called when a cell begins: the time at which it was sent tells how far the page's clock is off."""
    global _clock_offset_s
    kernel = getattr(ipython_shell.current(), "kernel", None)
    if kernel is None or not (sent_s := _sent_s(kernel.get_parent("shell"))):
        return
    offset_s = time.time() - sent_s
    _clock_offset_s = offset_s if _clock_offset_s is None else min(_clock_offset_s, offset_s)


def keep_what_comes_now() -> None:
    """Called when the person presses Stop: cells that are sent from now on run.

    The flag that makes ipykernel abort a request is private; it is only touched where it exists, and a test
    fails when that has no effect any more.
    """
    kernel = getattr(ipython_shell.current(), "kernel", None)
    if kernel is None or not hasattr(kernel, "_aborting"):
        return
    stopped_s = time.time() - (_clock_offset_s or 0.0) - _NOTICED_AFTER_S
    set_parent = type(kernel).set_parent

    def set_parent_and_keep(ident: Any, parent: Any, channel: str = "shell") -> None:
        # It is called with each request, just before the flag is looked at.
        set_parent(kernel, ident, parent, channel)
        if kernel._aborting and (_sent_s(parent) or 0.0) > stopped_s:
            kernel._aborting = False

    kernel.set_parent = set_parent_and_keep


def _sent_s(request: Any) -> float | None:
    """When a request was sent, by the page's clock; some versions of jupyter_client leave the date as
    text."""
    date = request.get("header", {}).get("date")
    if isinstance(date, str):
        date = datetime.fromisoformat(date)
    return date.timestamp() if isinstance(date, datetime) else None
