"""Lets a cell that is sent after Stop run, while the cells that waited behind the stopped one do not run.

When a cell ends in an error, ipykernel answers 'aborted' to all cells that have come by then, without a word
to the person. That is right for cells that were sent before Stop, as "Run All" sends them. But bringing all
ranks back takes up to a second, and a person who presses Stop and then runs the next cell would wonder where
it went.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell

_NOTICED_AFTER_S = 0.5
"""A kernel on a busy host notices Stop this much later. Nobody runs a cell and stops it in less time."""

_NOTE_PERIOD_S = 1.0
"""The clocks need not be compared in each of many cells that come one after the other."""

_noted_mono_s = -_NOTE_PERIOD_S
_clock_offset_s: float | None = None
"""An upper bound for how far the kernel's clock is ahead of the page's: the least time that a request took to
arrive, by the two clocks."""


def note_request() -> None:
    """Note, when a cell begins, the time at which it was sent: it tells how far the page's clock is off."""
    global _clock_offset_s, _noted_mono_s
    now_mono_s = time.monotonic()
    if now_mono_s - _noted_mono_s < _NOTE_PERIOD_S:
        return
    _noted_mono_s = now_mono_s
    kernel = getattr(ipython_shell.current(), "kernel", None)
    if kernel is None or not (sent_s := _sent_s(kernel.get_parent("shell"))):
        return
    offset_s = time.time() - sent_s
    _clock_offset_s = offset_s if _clock_offset_s is None else min(_clock_offset_s, offset_s)


def keep_what_comes_now() -> None:
    """Let cells run that are sent from now on. Call when the person presses Stop.

    The flag that makes ipykernel abort a request is private; it is only touched where it exists, and a test
    fails when that no longer has an effect.
    """
    shell = ipython_shell.current()
    kernel = getattr(shell, "kernel", None)
    if shell is None or kernel is None or not hasattr(kernel, "_aborting"):
        return
    stopped_s = time.time() - (_clock_offset_s or 0.0) - _NOTICED_AFTER_S
    set_parent = type(kernel).set_parent

    def set_parent_and_keep(ident: Any, parent: Any, channel: str = "shell") -> None:
        # ipykernel calls this method with each request, just before it looks at the flag.
        set_parent(kernel, ident, parent, channel)
        if kernel._aborting and (_sent_s(parent) or 0.0) > stopped_s:
            kernel._aborting = False

    def restore(_: Any) -> None:
        shell.events.unregister("pre_run_cell", restore)
        kernel.__dict__.pop("set_parent", None)

    kernel.set_parent = set_parent_and_keep
    # By the next cell that runs, ipykernel has stopped aborting. An error of that cell aborts the cells
    # behind it again, as "Run All" expects.
    shell.events.register("pre_run_cell", restore)


def _sent_s(request: Any) -> float | None:
    """Return when a request was sent, by the page's clock; some versions of jupyter_client leave the date as
    text."""
    date = request.get("header", {}).get("date")
    if isinstance(date, str):
        date = datetime.fromisoformat(date)
    return date.timestamp() if isinstance(date, datetime) else None
