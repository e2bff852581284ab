"""Leaves out messages that a kernel publishes for its pages: each one takes time in four processes.

The controller forwards each message and the notebook's kernel parses it, while the person waits for an empty
cell. ipyparallel's client waits for 'idle' and ignores the others; for a distributed cell the reply itself
gives the number of outputs to wait for.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from nbgpu.protocol.records import CellOptions, CellOutputs
from nbgpu.protocol.short_cuts import flush_only_what_was_written


def install(shell: Any) -> None:
    """Leave out needless flushes of the streams, and log lines of the kernel that are no warnings."""
    for stream in (sys.stdout, sys.stderr):
        flush_only_what_was_written(stream)
    # ipykernel makes five log lines for each request and writes one; that took a twelfth of the time of an
    # empty cell.
    log = shell.kernel.log
    getattr(log, "logger", log).setLevel(logging.WARNING)


class OutputCounter:
    """Counts the outputs of a distributed cell, for the metadata of its reply.

    Args:
        session: the kernel's, which sends the outputs.
    """

    def __init__(self, session: Any) -> None:
        self._cell: str | None = None
        self._num = 0
        self._lock = threading.Lock()  # text is published on a thread of its own
        self._send, session.send = session.send, self._send_and_count

    def begin(self, request: Any) -> None:
        """Count the outputs of this request, if it is a distributed cell, and no longer those of another."""
        with self._lock:
            self._cell = request["header"]["msg_id"] if CellOptions.METADATA in request["metadata"] else None
            self._num = 0

    def is_counting(self, request: Any) -> bool:
        """Whether the reply to this request has the number of outputs."""
        return self._cell is not None and self._cell == request["header"]["msg_id"]

    def complete(self, metadata: dict[str, Any]) -> None:
        """Put the number of outputs into the metadata of the reply."""
        if self._cell is not None:
            metadata[CellOutputs.NUM] = self._num
            metadata.pop("started", None)  # a date, which ipyparallel's client takes long to parse

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
