"""An engine leaves out what a kernel tells the pages in front of it: each message costs four processes some time.

The controller passes it on and the notebook's kernel takes it apart, while the person waits for an empty cell. ipyparallel's
client waits for 'idle' and has no use for the rest; for a distributed cell the answer itself says when all has come.
Some of the methods are private to ipykernel (from 6.29 to 7.4): where they are not there, more is said.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from nbgpu.protocol.records import CellOptions, CellOutputs
from nbgpu.protocol.streams import flush_only_what_was_written


def say_only_what_is_heard(kernel: Any) -> None:
    """From now on the engine does not publish a cell's code, nor that a request begins, and that it ends only where
    the answer does not say how much was published."""
    if hasattr(kernel, "_publish_execute_input"):
        kernel._publish_execute_input = lambda *_, **__: None
    outputs = _CountOutputs(kernel)
    if hasattr(kernel, "_publish_status"):
        publish_status = kernel._publish_status

        def publish_the_end(status: str, channel: str, *rest: Any, **options: Any) -> None:
            if status != "busy" and not (channel == "shell" and outputs.were_told):
                publish_status(status, channel, *rest, **options)

        kernel._publish_status = publish_the_end
    for stream in (sys.stdout, sys.stderr):
        flush_only_what_was_written(stream)
    # Of five lines for each request one is written; to make them took a twelfth of the time of an empty cell.
    getattr(kernel.log, "logger", kernel.log).setLevel(logging.WARNING)


class _CountOutputs:
    """Has the answer to a distributed cell say how many outputs were published before it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._cell: str | None = None
        self._num = 0
        self._lock = threading.Lock()  # text is published on a thread of its own
        self._init_metadata, kernel.init_metadata = kernel.init_metadata, self._begin
        self._finish_metadata, kernel.finish_metadata = kernel.finish_metadata, self._tell
        self._send, kernel.session.send = kernel.session.send, self._send_and_count

    @property
    def were_told(self) -> bool:
        """Whether the request that the engine is at was answered with a count."""
        return self._cell is not None and self._cell == self._kernel.get_parent("shell")["header"]["msg_id"]

    def _begin(self, request: Any) -> Any:
        with self._lock:
            self._cell = request["header"]["msg_id"] if CellOptions.METADATA in request["metadata"] else None
            self._num = 0
        return self._init_metadata(request)

    def _tell(self, request: Any, metadata: Any, answer: Any) -> Any:
        metadata = self._finish_metadata(request, metadata, answer)
        if self._cell is not None:
            metadata[CellOutputs.NUM] = self._num
            metadata.pop("started", None)  # a date, which takes ipyparallel's client long to read
        return metadata

    def _send_and_count(self, *args: Any, **options: Any) -> Any:
        sent = self._send(*args, **options)
        if (
            sent is not None
            and sent["msg_type"] in CellOutputs.KINDS
            and sent["parent_header"].get("msg_id") == self._cell
        ):
            with self._lock:
                self._num += 1
        return sent
