"""The one protocol through which the client does anything to the processes of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nbgpu.host.endings import ExitStatus, Whose
from nbgpu.machine.processes import CoreUse
from nbgpu.protocol.records import MainThreadState, Question


class ExitProbe(Protocol):
    """Tells repeatedly, and within microseconds, whether one process is exiting."""

    def is_ending(self) -> bool: ...

    def close(self) -> None: ...


class StackReader(Protocol):
    """Asks ranks for the Python stacks of their main threads, on whatever host the ranks are. On this
    process's own host it is `nbgpu.host.stacks.Stacks`."""

    def ask(self, pids: Iterable[int]) -> None: ...

    def collect(self, patience_s: float = 0.0) -> dict[int, MainThreadState]: ...

    def silent_s(self, pid: int) -> float: ...

    def computes(self, pid: int) -> bool | None: ...

    def waits_in_the_system(self, pid: int) -> bool: ...

    def standstill(self, pid: int) -> str: ...

    def cell_line(self, pid: int) -> int | None: ...

    def close(self) -> None: ...


class Questions(Protocol):
    """Takes the questions that ranks ask through `input()`, on whatever host the ranks are. On this process's
    own host it is `nbgpu.host.questions.Listener`."""

    def look(self, soon: bool = False) -> dict[int, Question]: ...

    def answer(self, number: int, text: str) -> None: ...

    def refuse(self) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """A host on which processes of a cluster run. Processes are named by their pids there."""

    @property
    def name(self) -> str:
        """The host's name, unique in the cluster."""

    def begin_engines(self, num: int) -> None:
        """Have the first engines forked, and return at once."""

    def fork_engine(self, take: Callable[[int, int], None]) -> None:
        """Have one more engine forked, and call `take` with its pid and its number in ipyparallel.

        Raises:
            OSError, ValueError: the fork server does not answer.
        """

    def prepare_to_train(self, recipes: Sequence[str]) -> None:
        """Have the imports done that later engines need to train, and return at once.

        Raises:
            OSError: the fork server does not answer.
        """

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to engines; one that has ended gets none."""

    def interrupt(self, pids: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in engines, and end the programs that they run."""

    def give_up(self, pids: Iterable[int], generation: int) -> None:
        """Tell ranks that a generation of their group is given up, and return at once."""

    def is_ending(self, pid: int) -> bool:
        """Whether a process is exiting or has ended."""

    def glance(self, pid: int) -> ExitProbe:
        """Make an object that tells repeatedly and fast whether a process is exiting."""

    def how_ended(self, pid: int) -> ExitStatus | None:
        """Return the exit status of an engine; None while it lives."""

    def num_ended(self) -> int:
        """The number of engines whose end is recorded."""

    def standstill(self, pid: int) -> str:
        """Return why something outside of a living process keeps it from running, such as SIGSTOP, with the
        remedy; empty if nothing does."""

    def resident_bytes(self, pid: int) -> int | None:
        """The memory that a process has in RAM; None if it has ended."""

    def core_uses(self, pids: Sequence[int]) -> dict[int, CoreUse]:
        """CPU time and wait for a core, by process; processes that have ended are left out."""

    def stacks(self) -> StackReader:
        """Make an object that asks ranks where they are. The caller closes it."""

    def questions(self) -> Questions:
        """Begin to take the ranks' questions, and return the object that has them. The caller closes it."""

    def log_tail(self, whose: Whose = "engines") -> str:
        """Return the last lines of a log, as sentences for an error message."""
