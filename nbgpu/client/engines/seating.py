"""Which engine has which rank: everything that must be known of a cluster's ranks beside their devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbgpu.client.engines.results import collect
from nbgpu.machine.signals import uninterrupted
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import GivenUp


@dataclass
class Seating:
    """The engines behind the ranks. It changes when an engine is replaced, and is kept for the next owner of
    the cluster."""

    engines: dict[int, int] = field(default_factory=dict)
    """ipyparallel's number of each rank's engine."""
    pids: dict[int, int] = field(default_factory=dict)
    """The process id of each rank."""
    spares: dict[int, int] = field(default_factory=dict)
    """ipyparallel's numbers of the spares, by pid."""
    leaving: list[int] = field(default_factory=list)
    """The process ids of ranks that are about to leave the group."""
    generation: int = 0
    """The generation of the group whose forming was begun last."""
    is_whole: bool = True
    """Whether all ranks joined that generation, and it has not been given up since."""

    @classmethod
    @uninterrupted()
    def at_start(cls, client: Any, world_size: int, timeout_s: float, check: Callable[[], None]) -> Seating:
        """Return the seating at a cluster's start: the first engines, by number, are the ranks; the others
        are spares.

        Raises:
            ClusterError: an engine does not answer in time; or `check`, which is called meanwhile, raises it.
        """
        numbers = sorted(client.ids)
        # Ask all engines before waiting for one: this is part of every start.
        asked = {number: client[number].apply_async(os.getpid) for number in numbers}
        pids = collect(asked, timeout_s, check)
        ranks = dict(enumerate(numbers[:world_size]))
        return cls(
            engines=ranks,
            pids={rank: pids[number] for rank, number in ranks.items()},
            spares={pids[number]: number for number in numbers[world_size:]},
        )

    def give_up(self, folder: Path) -> None:
        """Tell the ranks' sentinels that this generation of the group is given up; return at once.

        Args:
            folder: the cluster's folder, in which the sentinels listen.
        """
        with (
            suppress(FileNotFoundError),  # the folder is removed when the engines end
            short_path(folder) as short,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)
            for pid in self.pids.values():
                # The process is gone, or it is stopped and its queue is full, so that it reads this, too,
                # only when it goes on.
                with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    sender.sendto(str(self.generation).encode(), str(short / GivenUp.socket_name(pid)))
