"""Every exception that nbgpu raises on purpose.

NbgpuError
├── ConfigError    a setting is outside its bounds, or unknown (also a ValueError)
├── DataError      a file or a list of files cannot be used (also a ValueError)
├── ClusterError   engines could not be started, reached or stopped (also a RuntimeError)
│   ├── NoClusterError   there is no cluster, and the call needs one
│   └── NoFreeGpuError   fewer GPUs are free than a cluster is to take
├── RunError       a training run failed or cannot do what was asked (also a RuntimeError)
├── TransferError  a value cannot travel between the notebook and the ranks (also a TypeError)
├── OutOfMemoryError   a rank asked for more memory than there is (also a MemoryError)
└── RankError      a cell or a call raised on one rank or more (also a RuntimeError)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbgpu.text.ranks import named_ranks, ranks_by

if TYPE_CHECKING:
    from nbgpu.protocol.records import RankFailure


_EXPLAINED_BY_THEIR_MESSAGE = (
    "ConfigError",
    "DataError",
    "RunError",
    "CollectiveMismatch",
    "TransferError",
    "DataWorkerError",
)
"""nbgpu's errors on a rank for which only the message is shown, because the traceback would only show code of
nbgpu."""


class NbgpuError(Exception):
    """The base class: `except nbgpu.NbgpuError` catches everything that nbgpu raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython prints: only the message, because the traceback would only show code
        of nbgpu."""
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"]


class ConfigError(NbgpuError, ValueError):
    """One or more settings are wrong; the message has one line for each."""


class DataError(NbgpuError, ValueError):
    """A data file, folder or list cannot be used; the message has one line for each, with its file."""


class ClusterError(NbgpuError, RuntimeError):
    """Engines could not be started, reached or stopped."""


class NoClusterError(ClusterError):
    """There is no cluster yet, and the call needs one."""


class NoFreeGpuError(ClusterError):
    """Fewer GPUs are free than a cluster needs; the message names the holders of the others, and the
    options."""


class RunError(NbgpuError, RuntimeError):
    """A training run failed, or cannot fulfil a request in its present state."""


class TransferError(NbgpuError, TypeError):
    """Values cannot be transferred between the notebook and the ranks; the message has one line for each,
    with its path."""


class OutOfMemoryError(NbgpuError, MemoryError):
    """A rank needs more memory than there is; the message says what uses the memory and what would fit."""


class CellInterrupted(KeyboardInterrupt):
    """The user interrupted a distributed cell, and every rank has stopped it. A KeyboardInterrupt with a
    short traceback.

    Args:
        lost: the ranks whose processes have ended, so that their variables are lost.
        world_size: the number of ranks.
    """

    def __init__(self, lost: Sequence[int] = (), world_size: int = 0) -> None:
        self.lost = tuple(lost)
        self._world_size = world_size
        super().__init__(self.lost, world_size)

    def __str__(self) -> str:
        return f"the cell was stopped; {who_keeps_variables(self.lost, self._world_size)}"

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[0m: {self}"]


def who_keeps_variables(lost: Sequence[int], world_size: int) -> str:
    """Return a clause on the ranks that still have their variables, such as 'rank 0 keeps its variables'."""
    kept = [rank for rank in range(world_size) if rank not in lost]
    if not lost:
        return "the ranks keep their variables"
    if not kept:
        return "no rank keeps its variables"
    return f"{named_ranks(kept)} {'keeps its' if len(kept) == 1 else 'keep their'} variables"


class RankError(NbgpuError, RuntimeError):
    """Code raised an exception on one or more ranks.

    `failures` has one RankFailure for each, in order of rank. IPython shows the ranks' tracebacks instead of
    the notebook's, which would only show that nbgpu waits.

    Args:
        failures: at most one for each rank.
        world_size: the number of ranks, to detect that all ranks failed; 0 if it is not known.
        also: a text on a further problem, such as a rank that did not return, with the remedy; may be empty.
    """

    def __init__(self, failures: Sequence[RankFailure], world_size: int = 0, also: str = "") -> None:
        self.failures = tuple(failures)
        self._world_size = world_size
        self._also = also
        # The base class gets all arguments, because unpickling calls this constructor with them.
        super().__init__(self.failures, world_size, also)

    def __str__(self) -> str:
        by_text = ranks_by((f"{f.error_type}: {f.message}", f.rank) for f in self.failures)
        causes = "; ".join(f"{self._named(ranks)}: {text}" for text, ranks in by_text.items())
        return f"{causes}\n{self._also}" if self._also else causes

    @property
    def has_tracebacks(self) -> bool:
        """Whether any failure has a traceback of the user's code, and not only a message."""
        return any(failure.error_type not in _EXPLAINED_BY_THEIR_MESSAGE for failure in self.failures)

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython prints: the ranks' tracebacks; equal ones of several ranks only
        once."""
        # The text and the ranks of each traceback. Its key is the text without the numbers of cells, because
        # each rank counts its cells, and a rank that did not run a cell is behind by one.
        groups: dict[str, tuple[str, list[int]]] = {}
        for failure in self.failures:
            text = failure.traceback
            if failure.error_type in _EXPLAINED_BY_THEIR_MESSAGE:
                text = f"\x1b[31m{failure.error_type}\x1b[0m: {failure.message}"
            key = re.sub(r"In\[\d+\]", "In[]", text)
            groups.setdefault(key, (text, []))[1].append(failure.rank)
        lines: list[str] = []
        for text, ranks in groups.values():
            lines += [f"on {self._named(ranks)}:", *text.splitlines()]
        return [*lines, self._also] if self._also else lines

    def _named(self, ranks: Sequence[int]) -> str:
        """Return 'rank 1', 'ranks 0, 2', or 'all ranks'."""
        if len(ranks) == self._world_size > 1:
            return "all ranks"
        return named_ranks(ranks)
