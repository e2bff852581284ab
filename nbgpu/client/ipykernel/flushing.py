"""Spares a distributed cell that wrote nothing into the notebook's own streams the wait for them at its end.

After each cell ipykernel flushes stdout and stderr twice, and waits each time for the thread that sends; then
it sleeps half a millisecond, so that the answer does not overtake the output. That takes longer than an empty
cell takes to reach all ranks. The output of the ranks needs none of it: displays are handed to that thread
before, and it sends them in order.

The attribute with the sleep's length is private to ipykernel (from 6.29 to 7.4): where it does not exist, the
sleep is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ipykernel.iostream import OutStream

from nbgpu.protocol.short_cuts import are_plain, flush_only_what_was_written

_SLEEP = "_execute_sleep"

_give_back: list[Callable[[], None]] = []
"""Functions that undo the change; empty while the streams are as ipykernel made them."""


def arrange(shell: Any) -> None:
    """Leave out the wait until another cell begins; called by a cell that is about to go to the ranks."""
    if _give_back or are_plain():
        return
    kernel = shell.kernel
    sleep_s = getattr(kernel, _SLEEP, None)

    def sleep_again() -> None:
        if sleep_s is not None:
            setattr(kernel, _SLEEP, sleep_s)

    if sleep_s is not None:
        setattr(kernel, _SLEEP, 0.0)
        _give_back.append(sleep_again)
    own = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, OutStream)]
    _give_back.extend(flush_only_what_was_written(stream, sleep_again) for stream in own)


def undo() -> None:
    """Restore ipykernel's own way; called when a cell begins, which may be a plain one."""
    while _give_back:
        _give_back.pop()()


def install(shell: Any) -> None:
    """Let each cell begin with the streams as ipykernel made them; calling this again changes nothing."""
    uninstall(shell)
    shell.events.register("pre_execute", undo)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    undo()
    with suppress(ValueError):  # it was not installed
        shell.events.unregister("pre_execute", undo)
