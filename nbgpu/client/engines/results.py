"""Waits for the replies of ranks, and turns them into values by rank, or into a `RankError`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbgpu.client.engines.reply import Reply
from nbgpu.errors import ClusterError, RankError
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import RankFailure, RunState
from nbgpu.run_folder import folder as runs

_CHECK_PERIOD_S = 0.2
_LOOK_PERIOD_S = 0.02


class RanksLateError(ClusterError):
    """Ranks did not answer in time.

    Attributes:
        pending: their replies, by rank.
    """

    def __init__(self, message: str, pending: Mapping[int, Reply]) -> None:
        super().__init__(message)
        self.pending = pending


@uninterrupted()
def collect(
    results: Mapping[int, Reply],
    timeout_s: float | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[int, Any]:
    """Wait for all ranks and return their values, by rank.

    Args:
        results: the pending replies, by rank.
        timeout_s: the time after which ClusterError is raised, in seconds; None for no limit.
        check: a function that is called repeatedly meanwhile, and raises if there is nothing to wait for any
            more.

    Raises:
        RankError: a rank raised; the error has the failures of all ranks.
        ClusterError: a rank did not answer in time, or `check` raised it.
    """
    give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for rank, result in results.items():
        while not result.wait(max(0.0, min(_CHECK_PERIOD_S, give_up_s - time.monotonic()))):
            take_interrupt()
            check()
            if time.monotonic() > give_up_s:
                raise ClusterError(f"rank {rank} did not answer within {timeout_s:g} s")
    failed = failures(results)
    if failed:
        raise RankError(failed)
    return {rank: result.result() for rank, result in results.items()}


def failures(results: Mapping[int, Reply]) -> list[RankFailure]:
    """Return the failures of the ranks that failed. All of these replies must be here."""
    errors = {rank: result.exception() for rank, result in results.items()}
    return [_failure(rank, error) for rank, error in errors.items() if error is not None]


def _failure(rank: int, error: Exception) -> RankFailure:
    """Convert ipyparallel's error of a rank; raise any other exception, which did not come from a rank."""
    from ipyparallel import RemoteError

    if not isinstance(error, RemoteError):
        raise error
    if error.ename == "EngineError":
        return RankFailure(rank, "ClusterError", f"the process of rank {rank} is gone", error.evalue)
    return RankFailure(rank, error.ename, error.evalue, error.traceback)


def sentence(text: str) -> str:
    """Return the text with a full stop, unless it ends with a question mark."""
    return text if text.endswith("?") else f"{text}."


class LeftResult:
    """A `Reply` that reads the outcome of a training from the file that each rank writes to the run's folder.

    ipyparallel's result would not do: the controller sends it only to the client that asked for it, which may
    have ended by then.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._outcome: RunState | RankFailure | None = None

    def ready(self) -> bool:
        """Return whether the rank has written its outcome."""
        if self._outcome is None:
            self._outcome = runs.outcome(self._folder, self._rank)
        return self._outcome is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the rank's end, at most `timeout_s`; return whether it came."""
        give_up_s = time.monotonic() + timeout_s
        while not self.ready() and time.monotonic() < give_up_s:
            time.sleep(_LOOK_PERIOD_S)
        return self.ready()

    def add_done_callback(self, tell: Callable[[Any], object]) -> None:
        """Do nothing: callers call `ready` repeatedly, because nothing reports that the file was written."""

    def exception(self) -> Exception | None:
        """Return how the rank failed, once it has failed."""
        from ipyparallel import RemoteError

        failure = self._outcome
        if not isinstance(failure, RankFailure):
            return None
        error: Exception = RemoteError(failure.error_type, failure.message, failure.traceback)
        return error

    def result(self) -> RunState | None:
        """Return the state in which the rank ended."""
        return None if isinstance(self._outcome, RankFailure) else self._outcome
