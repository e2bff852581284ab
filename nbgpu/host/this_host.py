"""The host of this process, whose engines are reached directly."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nbgpu.host import endings
from nbgpu.host.endings import Endings, ExitStatus, Whose
from nbgpu.host.launch import REQUESTS_SOCKET
from nbgpu.host.questions import Listener
from nbgpu.host.stacks import Stacks
from nbgpu.machine import processes
from nbgpu.machine.processes import CoreUse, ProcessExitProbe
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.cluster_processes import TAKEN
from nbgpu.protocol.records import GivenUp

_PATIENCE_S = 60.0
"""The fork server answers only between imports, which may take long on a busy host."""
_POLL_PERIOD_S = 0.05


class ThisHost:
    """The host of this process. The cluster's processes are reached by signals, by sockets in the cluster's
    folder and through /proc. The methods are those of the protocol `Host`.

    Args:
        folder: the cluster's folder on this host.
        from_start: whether this process starts the cluster now; False if another process has started it.
    """

    def __init__(self, folder: Path, from_start: bool = False) -> None:
        self._folder = folder
        self._endings = Endings(folder, from_start)
        self.name = platform.node()

    def begin_engines(self, num: int) -> None:
        """Let the fork server fork the first engines, and return immediately."""
        with (
            suppress(ConnectionError),  # the fork server has ended
            socket.socket(socket.AF_UNIX) as parent,
            short_path(self._folder) as short,
        ):
            parent.connect(str(short / REQUESTS_SOCKET))
            parent.sendall(json.dumps({"begin": num}).encode())

    def fork_engine(self, take: Callable[[int, int], None], number: int | None = None) -> None:
        """Let the fork server fork another engine.

        Args:
            take: called with the pid and the engine id under which the engine will register with ipyparallel.
                From then on the engine belongs to the caller. If an interrupt comes before, the engine ends.
            number: the engine's id in ipyparallel; None for the next one of this host.

        Raises:
            OSError, ValueError: the fork server does not answer.
        """
        with _fork_server(self._folder) as fork_server:
            fork_server.sendall(json.dumps({"fork": number}).encode())
            answer = json.loads(_received(fork_server))
            with uninterrupted():
                take(answer["pid"], answer["engine"])
                # Without this confirmation the fork server ends the engine, which no cluster would use.
                fork_server.sendall(TAKEN)

    def prepare_to_train(self, recipes: Sequence[str]) -> None:
        """Let the fork server import the modules that later engines need to train, and return immediately,
        without an answer, because the fork server may still be busy with other imports."""
        with _fork_server(self._folder) as fork_server:
            fork_server.sendall(json.dumps({"train": list(recipes)}).encode())

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to engines; engines that have ended are left out."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def interrupt(self, pids: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in engines, and end the programs that they run, as Ctrl-C does."""
        for pid in pids:
            self.send_signal([pid], signal.SIGINT)
            processes.interrupt_programs_of(pid)

    def give_up(self, pids: Iterable[int], generation: int) -> None:
        """Tell the sentinel threads of ranks that a generation of their process group is given up, and return
        immediately."""
        with (
            suppress(FileNotFoundError),  # the folder is removed when the engines end
            short_path(self._folder) as short,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)
            for pid in pids:
                # The process has ended, or it is stopped and its queue is full. In that case it reads the
                # earlier messages when it continues, which have the same effect.
                with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    sender.sendto(str(generation).encode(), str(short / GivenUp.socket_name(pid)))

    def is_ending(self, pid: int) -> bool:
        """Return whether a process is exiting or has ended."""
        return processes.is_ending(pid)

    def glance(self, pid: int) -> ProcessExitProbe:
        """Return an object that checks repeatedly and fast whether a process is exiting."""
        return ProcessExitProbe(pid)

    def how_ended(self, pid: int) -> ExitStatus | None:
        """Return the exit status of an engine; None while it lives."""
        return self._endings.of(pid)

    def num_ended(self) -> int:
        """Return the number of engines whose end is recorded."""
        return sum(1 for _ in self._folder.glob("ended-*"))

    def standstill(self, pid: int) -> str:
        """Return why a living process is stopped from outside, such as by SIGSTOP, with the remedy; empty if
        it is not."""
        return processes.standstill(pid)

    def resident_bytes(self, pid: int) -> int | None:
        """Return the resident memory of a process; None if it has ended."""
        return processes.resident_bytes(pid)

    def core_uses(self, pids: Sequence[int]) -> dict[int, CoreUse]:
        """Return CPU time and wait for a core, by pid; processes that have ended are left out."""
        return {pid: use for pid in pids if (use := processes.core_use(pid)) is not None}

    def stacks(self) -> Stacks:
        """Return an object that asks ranks for their stacks. The caller closes it."""
        return Stacks(self._folder)

    def questions(self) -> Listener:
        """Return an object that receives the ranks' questions of `input()`. The caller closes it."""
        return Listener(self._folder)

    def log_tail(self, whose: Whose = "engines") -> str:
        """Return the last lines of a log, as sentences for an error message."""
        return endings.log_tail(self._folder, whose)


@contextmanager
def _fork_server(folder: Path) -> Iterator[socket.socket]:
    """Connect to the fork server for the block. The timeout is long because the fork server answers only
    after its imports."""
    with socket.socket(socket.AF_UNIX) as fork_server:
        fork_server.settimeout(_PATIENCE_S)
        with short_path(folder) as short:
            fork_server.connect(str(short / REQUESTS_SOCKET))
        yield fork_server


def _received(fork_server: socket.socket) -> bytes:
    """Return the answer of the fork server; TimeoutError if it takes too long. An interrupt ends the wait."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while not select.select([fork_server], [], [], _POLL_PERIOD_S)[0]:
        take_interrupt()
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")
    return fork_server.recv(4096)
