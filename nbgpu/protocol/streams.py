"""ipykernel's stdout and stderr, without the waits for what was never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flush_only_what_was_written(
    stream: Any, about_to_flush: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Each request flushes both streams twice, and each time waits for the thread that sends; now only where text waits.

    Whether it does is private to ipykernel (from 6.29 to 7.4): where that cannot be seen, all is flushed as ever.

    Args:
        stream: an ipykernel OutStream.
        about_to_flush: called before text is flushed.

    Returns:
        What gives the stream its own way back.
    """
    before = vars(stream).get("flush")
    flush = stream.flush

    def flush_what_waits() -> None:
        # Text that the other thread has begun to send goes before all that is handed to it from now on.
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
