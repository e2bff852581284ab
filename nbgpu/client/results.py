"""What ipyparallel's results say, in our words: values by rank, or the ranks' own failures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ipyparallel as ipp

from nbgpu.errors import ClusterError, RankError
from nbgpu.records import RankFailure


def collect(results: Mapping[int, ipp.AsyncResult], timeout_s: float | None = None) -> dict[int, Any]:
    """Waits for all ranks and returns their values; RankError with every rank's failure if any raised."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    for rank, result in results.items():
        if not result.wait(-1 if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
            raise ClusterError(f"rank {rank} did not answer within {timeout_s:g} s")
    failed = failures(results)
    if failed:
        raise RankError(failed)
    return {rank: result.result() for rank, result in results.items()}


def failures(results: Mapping[int, ipp.AsyncResult]) -> list[RankFailure]:
    """What went wrong on each rank, of results that are all done."""
    found = []
    for rank, result in results.items():
        error = result.exception()
        if isinstance(error, ipp.RemoteError) and error.ename == "EngineError":
            found.append(
                RankFailure(rank, "ClusterError", f"the process of rank {rank} is gone", error.evalue)
            )
        elif isinstance(error, ipp.RemoteError):
            found.append(RankFailure(rank, error.ename, error.evalue, error.traceback))
        elif error is not None:
            raise error
    return found
