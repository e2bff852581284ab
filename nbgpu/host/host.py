"""The protocol (interface) through which the client controls the processes of a cluster on any host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nbgpu.host.endings import ExitStatus, Whose
from nbgpu.machine.processes import CoreUse
from nbgpu.protocol.records import MainThreadState, Question


class ExitProbe(Protocol):
    """Checks repeatedly, and within microseconds, whether one process is exiting."""

    def is_ending(self) -> bool: ...

    def close(self) -> None: ...


class StackReader(Protocol):
    """Asks ranks for the Python stacks of their main threads, on any host. For ranks on this process's host
    it is `nbgpu.host.stacks.Stacks`."""

    def ask(self, pids: Iterable[int]) -> None: ...

    def collect(self, patience_s: float = 0.0) -> dict[int, MainThreadState]: ...

    def silent_s(self, pid: int) -> float: ...

    def computes(self, pid: int) -> bool | None: ...

    def waits_in_the_system(self, pid: int) -> bool: ...

    def standstill(self, pid: int) -> str: ...

    def cell_line(self, pid: int) -> int | None: ...

    def close(self) -> None: ...


class Questions(Protocol):
    """Receives the questions that ranks ask through `input()`, on any host. For ranks on this process's host
    it is `nbgpu.host.questions.Listener`."""

    def look(self, soon: bool = False) -> dict[int, Question]: ...

    def answer(self, number: int, text: str) -> None: ...

    def refuse(self) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """A host on which processes of a cluster run. Processes are identified by their pids on that host."""

    @property
    def name(self) -> str:
        """The host's name, unique in the cluster."""

    def begin_engines(self, num: int) -> None:
        """Let the fork server fork the first engines, and return immediately."""

    def fork_engine(self, take: Callable[[int, int], None]) -> None:
        """Let the fork server fork another engine, and call `take` with its pid and its ipyparallel id.

        Raises:
            OSError, ValueError: the fork server does not answer.
        """

    def prepare_to_train(self, recipes: Sequence[str]) -> None:
        """Let the fork server import the modules that later engines need to train, and return immediately.

        Raises:
            OSError: the fork server does not answer.
        """

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to engines; engines that have ended are left out."""

    def interrupt(self, pids: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in engines, and end the programs that they run."""

    def give_up(self, pids: Iterable[int], generation: int) -> None:
        """Tell ranks that a generation of their process group is given up, and return immediately."""

    def is_ending(self, pid: int) -> bool:
        """Return whether a process is exiting or has ended."""

    def glance(self, pid: int) -> ExitProbe:
        """Return an object that checks repeatedly and fast whether a process is exiting."""

    def how_ended(self, pid: int) -> ExitStatus | None:
        """Return the exit status of an engine; None while it lives."""

    def num_ended(self) -> int:
        """Return the number of engines whose end is recorded."""

    def standstill(self, pid: int) -> str:
        """Return why a living process is stopped from outside, such as by SIGSTOP, with the remedy; empty if
        it is not."""

    def resident_bytes(self, pid: int) -> int | None:
        """Return the resident memory of a process; None if it has ended."""

    def core_uses(self, pids: Sequence[int]) -> dict[int, CoreUse]:
        """Return CPU time and wait for a core, by pid; processes that have ended are left out."""

    def stacks(self) -> StackReader:
        """Return an object that asks ranks for their stacks. The caller closes it."""

    def questions(self) -> Questions:
        """Return an object that receives the ranks' questions of `input()`. The caller closes it."""

    def log_tail(self, whose: Whose = "engines") -> str:
        """Return the last lines of a log, as sentences for an error message."""
