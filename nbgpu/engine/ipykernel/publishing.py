"""Leaves out messages that a kernel publishes for its pages: each one takes time in four processes.

The controller forwards each message and the notebook's kernel parses it, while the person waits for an empty
cell. ipyparallel's client waits for 'idle' and ignores the others; for a distributed cell the reply itself
gives the number of outputs to wait for. Some of the methods are private to ipykernel (6.29 to 7.4); without
them more is published.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from nbgpu.protocol.records import CellOptions, CellOutputs
from nbgpu.protocol.streams import flush_only_what_was_written


def say_only_what_is_heard(kernel: Any) -> None:
    """Stop publishing the code of cells and the status 'busy', and 'idle' where the reply gives the number of
    outputs."""
    if hasattr(kernel, "_publish_execute_input"):
        kernel._publish_execute_input = lambda *_, **__: None
    outputs = _CountOutputs(kernel)
    if hasattr(kernel, "_publish_status"):
        publish_status = kernel._publish_status

        def publish_the_end(status: str, channel: str, *rest: Any, **options: Any) -> None:
            if status != "busy" and not (channel == "shell" and outputs.are_counted):
                publish_status(status, channel, *rest, **options)

        kernel._publish_status = publish_the_end
    for stream in (sys.stdout, sys.stderr):
        flush_only_what_was_written(stream)
    # ipykernel makes five log lines for each request and writes one; that took a twelfth of the time of an
    # empty cell.
    getattr(kernel.log, "logger", kernel.log).setLevel(logging.WARNING)


class _CountOutputs:
    """Counts the outputs of a distributed cell, and puts their number into the reply."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._cell: str | None = None
        self._num = 0
        self._lock = threading.Lock()  # text is published on a thread of its own
        self._init_metadata, kernel.init_metadata = kernel.init_metadata, self._begin
        self._finish_metadata, kernel.finish_metadata = kernel.finish_metadata, self._add_count
        self._send, kernel.session.send = kernel.session.send, self._send_and_count

    @property
    def are_counted(self) -> bool:
        """Whether the reply to the current request has the number of outputs."""
        return self._cell is not None and self._cell == self._kernel.get_parent("shell")["header"]["msg_id"]

    def _begin(self, request: Any) -> Any:
        with self._lock:
            self._cell = request["header"]["msg_id"] if CellOptions.METADATA in request["metadata"] else None
            self._num = 0
        return self._init_metadata(request)

    def _add_count(self, request: Any, metadata: Any, answer: Any) -> Any:
        metadata = self._finish_metadata(request, metadata, answer)
        if self._cell is not None:
            metadata[CellOutputs.NUM] = self._num
            metadata.pop("started", None)  # a date, which ipyparallel's client takes long to parse
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
