"""What the engines of this host are sent: signals, and the generation of their group that is given up."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nbgpu.machine import processes
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import GivenUp


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to engines; one that has ended gets none."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def interrupt(pids: Iterable[int]) -> None:
    """Raise KeyboardInterrupt in the Python code of engines, and end the programs that they run, as Ctrl-C
    would."""
    for pid in pids:
        send([pid], signal.SIGINT)
        processes.interrupt_programs_of(pid)


def give_up(folder: Path, pids: Iterable[int], generation: int) -> None:
    """Tell the sentinels of these ranks that a generation of their group is given up, and return at once.

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
