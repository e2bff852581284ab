"""Optimizations of distributed cells that the notebook and the engines share: the switch that turns them off,
and the flushes of ipykernel's stdout and stderr.

With NBGPU_PLAIN_CELLS=1 in the environment of the notebook's kernel, which its engines inherit, ipykernel and
ipyparallel send, run and answer cells without optimizations, which takes some milliseconds longer. A fault
that disappears with the switch is in one of the optimizations, for example after an upgrade that renamed a
private name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "NBGPU_PLAIN_CELLS"


def are_plain() -> bool:
    """Return whether the optimizations are turned off in this process."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def flush_only_what_was_written(
    stream: Any, about_to_flush: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Replace a stream's `flush` by one that does nothing if no text is waiting.

    ipykernel flushes both streams twice in each request, and each time waits for its IOPub thread. Whether
    text is waiting is a private attribute of ipykernel (from 6.29 to 7.4); if it is missing, every flush is
    done.

    Args:
        stream: an ipykernel OutStream.
        about_to_flush: called before text is flushed.

    Returns:
        A function that restores the stream's own `flush`.
    """
    before = vars(stream).get("flush")
    flush = stream.flush

    def flush_what_waits() -> None:
        # `_flush_pending` is False as soon as ipykernel's IOPub thread has begun to send the text. That
        # thread sends in order, so that the text comes before everything that is passed to it later.
        if getattr(stream, "_flush_pending", True):
            about_to_flush()
            flush()

    def restore() -> None:
        if before is None:
            del stream.flush
        else:
            stream.flush = before

    stream.flush = flush_what_waits
    return restore
