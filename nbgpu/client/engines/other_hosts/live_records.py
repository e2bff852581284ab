"""Hears what ranks on other hosts record, a moment after they have written it.

A rank's socket for its records listens on its own host alone. For a rank elsewhere the host's engine reads
the end of its file there, which on a shared file system is seen here some seconds later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.protocol.calls import Call
from nbgpu.run_folder.rank_files import record_path
from nbgpu.run_folder.reader import Reader

_PERIOD_S = 0.25
_POLL_PERIOD_S = 0.02
_MOST_BYTES = 2**18
"""Of each file with one message; the reader finds the rest in the file."""


class LiveRecords:
    """Asks hosts for new records of their ranks in a thread, until it is closed.

    Args:
        folder: the run's folder, which the hosts see.
        ranks_of: a function that returns the present ranks on each host, which may be lost or come back.
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
        """Ask no more."""
        self._closing.set()
        if self._is_needed:
            self._thread.join()

    def _follow(self) -> None:
        """Ask each host for new lines four times a second, and pass the answers to the reader."""
        asked: dict[OtherHost, tuple[Any, Sequence[int]]] = {}
        due_mono_s: dict[OtherHost, float] = {}
        while not self._closing.wait(_POLL_PERIOD_S if asked else _PERIOD_S):
            for host in [host for host, (reply, _) in asked.items() if reply.wait(0) or not host.is_there]:
                reply, ranks = asked.pop(host)
                if reply.wait(0) and reply.successful():
                    self._append(ranks, reply.get())
                due_mono_s[host] = time.monotonic() + _PERIOD_S
            for host, ranks in self._ranks_of().items():
                is_due = time.monotonic() >= due_mono_s.get(host, 0.0)
                if host in asked or not is_due or not host.is_there:
                    continue
                files = {
                    str(record_path(self._folder, rank)): self._reader.offset_bytes(rank) for rank in ranks
                }
                try:
                    asked[host] = host.tell(Call.NEW_LINES_ON_HOST, files, _MOST_BYTES), ranks
                except ConnectionError:
                    continue  # whoever watches over the ranks says so

    def _append(self, ranks: Sequence[int], new: Mapping[str, bytes]) -> None:
        for rank in ranks:
            self._reader.hear(rank, new.get(str(record_path(self._folder, rank)), b""))
