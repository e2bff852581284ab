"""Tells the sentinels of this host's ranks that a generation of their group is given up."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import GivenUp


def give_up(folder: Path, pids: Iterable[int], generation: int) -> None:
    """Tell these ranks' sentinels, and return at once.

    Args:
        folder: the cluster's folder on this host, in which the sentinels listen.
    """
    with (
        suppress(FileNotFoundError),  # the folder is removed when the engines end
        short_path(folder) as short,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.setblocking(False)
        for pid in pids:
            # The process is gone, or it is stopped and its queue is full, so that it reads this, too,
            # only when it goes on.
            with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                sender.sendto(str(generation).encode(), str(short / GivenUp.socket_name(pid)))
