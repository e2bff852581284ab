"""Brings the records (metrics, events) of ranks on other hosts here, a moment after they were written.

A rank sends its records only to readers on its own host. For a rank on another host, that host's engine reads
the new lines of the rank's file: on a shared file system they would be visible here some seconds later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.protocol.calls import Call
from nbgpu.run_folder.rank_files import record_path
from nbgpu.run_folder.reader import Reader

_PERIOD_S = 0.25
_POLL_PERIOD_S = 0.02
_MOST_BYTES = 2**18
"""The most bytes of each file in one message; the reader finds the rest in the file."""


class LiveRecords:
    """Asks hosts for new records of their ranks, on a thread, until `close`.

    Args:
        folder: the run's folder, which the hosts share.
        ranks_of: a function that returns the ranks on each host now: hosts may be lost or come back.
        reader: gets the records.
    """

    def __init__(
        self, folder: Path, ranks_of: Callable[[], Mapping[OtherHost, Sequence[int]]], reader: Reader
    ) -> None:
        self._folder = folder
        self._ranks_of = ranks_of
        self._reader = reader
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nbgpu-live-records", daemon=True)
        self._is_needed = bool(ranks_of())
        if self._is_needed:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._is_needed:
            self._thread.join()

    def _follow(self) -> None:
        """Ask each host for new lines four times a second, and pass the answers to the reader."""
        requests: dict[OtherHost, tuple[Any, Sequence[int]]] = {}
        due_mono_s: dict[OtherHost, float] = {}
        while not self._closing.wait(_POLL_PERIOD_S if requests else _PERIOD_S):
            # Take the answers, and drop the requests to hosts that were lost meanwhile.
            for host in [host for host, (reply, _) in requests.items() if reply.wait(0) or not host.is_there]:
                reply, ranks = requests.pop(host)
                if reply.wait(0) and reply.successful():
                    lines = reply.get()
                    for rank in ranks:
                        self._reader.hear(rank, lines.get(str(record_path(self._folder, rank)), b""))
                due_mono_s[host] = time.monotonic() + _PERIOD_S
            # Ask the hosts whose turn it is.
            for host, ranks in self._ranks_of().items():
                is_due = time.monotonic() >= due_mono_s.get(host, 0.0)
                if host in requests or not is_due or not host.is_there:
                    continue
                files = {
                    str(record_path(self._folder, rank)): self._reader.offset_bytes(rank) for rank in ranks
                }
                # A host may be lost at any moment; whoever watches the ranks reports that.
                with suppress(ConnectionError):
                    requests[host] = host.tell(Call.NEW_LINES_ON_HOST, files, _MOST_BYTES), ranks
