"""An engine leaves out what a kernel tells the pages in front of it: each message costs five processes some time.

The controller passes it on and the notebook's kernel takes it apart, while the person waits for an empty cell. ipyparallel's
client waits for 'idle' and has no use for the rest. The methods are private to ipykernel (from 6.29 to 7.4): where
they are not there, more is said.
"""

from __future__ import annotations

import sys
from typing import Any


def say_only_what_is_heard(kernel: Any) -> None:
    """From now on the engine does not publish a cell's code, nor that a request begins."""
    if hasattr(kernel, "_publish_execute_input"):
        kernel._publish_execute_input = lambda *_, **__: None
    if hasattr(kernel, "_publish_status"):
        publish_status = kernel._publish_status

        def publish_the_end(status: str, *rest: Any, **options: Any) -> None:
            if status != "busy":
                publish_status(status, *rest, **options)

        kernel._publish_status = publish_the_end
    for stream in (sys.stdout, sys.stderr):
        _flush_only_what_was_written(stream)


def _flush_only_what_was_written(stream: Any) -> None:
    """Each request flushes both streams twice, and each time waits for the thread that sends."""
    write, flush = stream.write, stream.flush
    written = False

    def write_and_note(text: str) -> Any:
        nonlocal written
        written = True
        return write(text)

    def flush_if_written() -> None:
        nonlocal written
        if written:
            written = False  # first: what another thread writes meanwhile is for the next flush
            flush()

    stream.write, stream.flush = write_and_note, flush_if_written
