"""ipykernel's stdout and stderr, without the waits for what was never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flush_only_what_was_written(
    stream: Any, written_to: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Each request flushes both streams twice, and each time waits for the thread that sends; now only after text.

    Args:
        stream: an ipykernel OutStream.
        written_to: called with each text that is written, before it is.

    Returns:
        What gives the stream its own ways back.
    """
    own = {name: vars(stream)[name] for name in ("write", "flush") if name in vars(stream)}
    write, flush = stream.write, stream.flush
    written = False

    def write_and_note(text: str) -> Any:
        nonlocal written
        written = True
        written_to()
        return write(text)

    def flush_if_written() -> None:
        nonlocal written
        if written:
            written = False  # first: what another thread writes meanwhile is for the next flush
            flush()

    def restore() -> None:
        del stream.write, stream.flush
        vars(stream).update(own)

    stream.write, stream.flush = write_and_note, flush_if_written
    return restore
