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

from nbgpu.text.ranks import named_ranks

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
"""nbgpu's own errors on a rank. Their message says everything, and their traceback would lead through
nbgpu."""


class NbgpuError(Exception):
    """The root: `except nbgpu.NbgpuError` catches all that nbgpu raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython prints: the message alone. It says what to do, and a traceback would
        lead through nbgpu."""
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
    """Fewer GPUs are free than a cluster is to take; the message says who has the others, and what can be
    done."""


class RunError(NbgpuError, RuntimeError):
    """A training run failed, or cannot do what was asked of it now."""


class TransferError(NbgpuError, TypeError):
    """A value cannot travel between the notebook and the ranks; the message has one line for each, with its
    path."""


class OutOfMemoryError(NbgpuError, MemoryError):
    """A rank asked for more memory than there is; the message says what holds it and what would have
    fitted."""


class CellInterrupted(KeyboardInterrupt):
    """The user stopped a distributed cell, and every rank is back. A KeyboardInterrupt with a short
    traceback.

    Args:
        lost: the ranks whose processes, and with them their variables, are gone.
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
    """Say which ranks still have their variables: 'the ranks keep their variables', or 'rank 0 keeps its
    variables'."""
    kept = [rank for rank in range(world_size) if rank not in lost]
    if not lost:
        return "the ranks keep their variables"
    if not kept:
        return "no rank keeps its variables"
    return f"{named_ranks(kept)} {'keeps its' if len(kept) == 1 else 'keep their'} variables"


class RankError(NbgpuError, RuntimeError):
    """Code raised on one or more ranks.

    `failures` holds one RankFailure for each, in order of rank. IPython shows the ranks' own tracebacks
    in place of the notebook's, which would only show nbgpu waiting.

    Args:
        failures: at most one for each rank.
        world_size: the number of ranks, to tell whether all of them failed; 0 where it is not known.
        also: a text about what else went wrong, such as a rank that did not come back, and what to do; may be
            empty.
    """

    def __init__(self, failures: Sequence[RankFailure], world_size: int = 0, also: str = "") -> None:
        self.failures = tuple(failures)
        self._world_size = world_size
        self._also = also
        # The exception gets the arguments themselves, because unpickling calls this constructor with them
        # again.
        super().__init__(self.failures, world_size, also)

    def __str__(self) -> str:
        ranks_by_text: dict[str, list[int]] = {}
        for failure in self.failures:
            ranks_by_text.setdefault(f"{failure.error_type}: {failure.message}", []).append(failure.rank)
        causes = "; ".join(f"{self._named(ranks)}: {text}" for text, ranks in ranks_by_text.items())
        return f"{causes}\n{self._also}" if self._also else causes

    @property
    def has_tracebacks(self) -> bool:
        """Whether any failure has a traceback of the user's code to show, and not only a message."""
        return any(failure.error_type not in _EXPLAINED_BY_THEIR_MESSAGE for failure in self.failures)

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython prints: each rank's traceback, and the same one of several ranks only
        once."""
        text_by_kind: dict[str, str] = {}
        ranks_by_kind: dict[str, list[int]] = {}
        for failure in self.failures:
            text = failure.traceback
            if failure.error_type in _EXPLAINED_BY_THEIR_MESSAGE:
                text = f"\x1b[31m{failure.error_type}\x1b[0m: {failure.message}"
            # Ranks number their cells on their own, so one that sat out a cell is behind by one.
            kind = re.sub(r"In\[\d+\]", "In[]", text)
            text_by_kind.setdefault(kind, text)
            ranks_by_kind.setdefault(kind, []).append(failure.rank)
        lines: list[str] = []
        for kind, ranks in ranks_by_kind.items():
            lines.append(f"on {self._named(ranks)}:")
            lines.extend(text_by_kind[kind].splitlines())
        return [*lines, self._also] if self._also else lines

    def _named(self, ranks: Sequence[int]) -> str:
        """'rank 1', 'ranks 0, 2', or 'all ranks'."""
        if len(ranks) == self._world_size > 1:
            return "all ranks"
        return named_ranks(ranks)
