"""Shorten the end of a distributed cell that has written nothing to the kernel's stdout and stderr.

After each cell ipykernel flushes stdout and stderr twice, and waits each time for the thread that sends the
output; then it sleeps half a millisecond, so that the reply does not overtake the output. All this takes
longer than sending an empty cell to all ranks. The output of the ranks does not need it: it consists of
displays, which that thread already has and sends in order.

The attribute with the length of the sleep is private to ipykernel (6.29 to 7.4). Where it does not exist, the
sleep stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ipykernel.iostream import OutStream

from nbgpu.protocol.short_cuts import are_plain, flush_only_what_was_written

_SLEEP = "_execute_sleep"

_undo_actions: list[Callable[[], None]] = []
"""Functions that undo the change; empty while the streams are as ipykernel made them."""


def arrange(shell: Any) -> None:
    """Skip the flushes and the sleep at the end of this cell. A cell calls this before it goes to the ranks.
    If the cell writes to a stream after all, the sleep is restored."""
    if _undo_actions or are_plain():
        return
    kernel = shell.kernel
    sleep_s = getattr(kernel, _SLEEP, None)

    def restore_sleep() -> None:
        if sleep_s is not None:
            setattr(kernel, _SLEEP, sleep_s)

    if sleep_s is not None:
        setattr(kernel, _SLEEP, 0.0)
        _undo_actions.append(restore_sleep)
    kernel_streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, OutStream)]
    _undo_actions.extend(flush_only_what_was_written(stream, restore_sleep) for stream in kernel_streams)


def undo() -> None:
    """Restore the behaviour of ipykernel. This is called when any cell begins, which may be a plain one."""
    while _undo_actions:
        _undo_actions.pop()()


def install(shell: Any) -> None:
    """Call `undo` when a cell begins; calling this again changes nothing."""
    uninstall(shell)
    shell.events.register("pre_execute", undo)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    undo()
    with suppress(ValueError):  # it was not installed
        shell.events.unregister("pre_execute", undo)
