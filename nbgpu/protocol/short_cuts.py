"""The short cuts of distributed cells that both sides share: the switch that turns them off, and ipykernel's
stdout and stderr without needless flushes.

With NBGPU_PLAIN_CELLS=1 in the environment of the notebook's kernel, and so of its engines, ipykernel and
ipyparallel send, run and answer cells in their own way, which takes some milliseconds longer. A fault that
goes away with the switch is in one of the short cuts. An upgrade that moves a private name can cause such a
fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "NBGPU_PLAIN_CELLS"


def are_plain() -> bool:
    """Whether this process does without the short cuts."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def flush_only_what_was_written(
    stream: Any, about_to_flush: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Make a stream's `flush` do nothing while no text is waiting.

    ipykernel flushes both streams twice in each request, and each time waits for the thread that sends.
    Whether text is waiting is a private attribute of ipykernel (from 6.29 to 7.4); where it is missing, every
    flush takes place.

    Args:
        stream: an ipykernel OutStream.
        about_to_flush: called before text is flushed.

    Returns:
        A function that restores the stream's own `flush`.
    """
    before = vars(stream).get("flush")
    flush = stream.flush

    def flush_what_waits() -> None:
        """Flush the stream, unless ipykernel says that no text waits."""
        # `_flush_pending` is False once ipykernel's IOPub thread has begun to send the text. That thread
        # sends in order, so that the text goes before anything that is handed to it later.
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
