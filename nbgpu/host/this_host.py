"""The host of this process, whose engines it reaches directly."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nbgpu.host import endings, forking, logs, signalling
from nbgpu.host.endings import Endings, ExitStatus
from nbgpu.host.logs import Whose
from nbgpu.host.questions import Listener
from nbgpu.host.stacks import Stacks
from nbgpu.machine import processes
from nbgpu.machine.processes import CoreUse, ProcessExitProbe


class ThisHost:
    """Does what `Host` says, with direct calls.

    Args:
        folder: the cluster's folder on this host.
        from_start: whether the cluster begins now; else another process has started it.
    """

    def __init__(self, folder: Path, from_start: bool = False) -> None:
        self._folder = folder
        self._endings = Endings(folder, from_start)
        self.name = platform.node()

    def begin_engines(self, num: int) -> None:
        """Have the first engines forked, and return at once."""
        forking.begin(self._folder, num)

    def fork_engine(self, take: Callable[[int, int], None], number: int | None = None) -> None:
        """Have one more engine forked, and call `take` with its pid and its number in ipyparallel."""
        forking.fork(self._folder, take, number)

    def prepare_to_train(self, recipes: Sequence[str]) -> None:
        """Have the imports done that later engines need to train, and return at once."""
        forking.prepare_to_train(self._folder, recipes)

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to engines; one that has ended gets none."""
        signalling.send(pids, number)

    def interrupt(self, pids: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in engines, and end the programs that they run."""
        signalling.interrupt(pids)

    def give_up(self, pids: Iterable[int], generation: int) -> None:
        """Tell ranks that a generation of their group is given up, and return at once."""
        signalling.give_up(self._folder, pids, generation)

    def is_ending(self, pid: int) -> bool:
        """Whether a process is on its way out."""
        return processes.is_ending(pid)

    def glance(self, pid: int) -> ProcessExitProbe:
        """Make an object for frequent looks at a process."""
        return ProcessExitProbe(pid)

    def how_ended(self, pid: int) -> ExitStatus | None:
        """How an engine ended; None while it lives."""
        return self._endings.of(pid)

    def num_ended(self) -> int:
        """The number of engines whose end is recorded."""
        return endings.recorded(self._folder)

    def standstill(self, pid: int) -> str:
        """Why a living process does nothing at all, and the remedy, in words; empty if nothing holds it."""
        return processes.standstill(pid)

    def resident_bytes(self, pid: int) -> int | None:
        """The memory that a process has in RAM; None if it has ended."""
        return processes.resident_bytes(pid)

    def core_uses(self, pids: Sequence[int]) -> dict[int, CoreUse]:
        """The core time that each process has used and waited for; one that has ended is left out."""
        return {pid: used for pid in pids if (used := processes.core_use(pid)) is not None}

    def stacks(self) -> Stacks:
        """Make an object that asks ranks where they are. The caller closes it."""
        return Stacks(self._folder)

    def questions(self) -> Listener:
        """Begin to take the ranks' questions, and return the object that has them. The caller closes it."""
        return Listener(self._folder)

    def log_tail(self, whose: Whose = "engines") -> str:
        """The last lines of a log, as sentences for an error message."""
        return logs.tail(self._folder, whose)
