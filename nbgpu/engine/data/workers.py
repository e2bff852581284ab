"""A rank's worker processes, which decode and augment volumes ahead of the training steps.

An engine has threads, connections and perhaps a GPU, which do not survive a fork. So workers are forked by
Python's forkserver, a separate process without threads that has imported the modules that workers need. The
first workers of an engine wait for those imports (3 to 6 s on an idle host, as long as each spawned worker
would take); later workers start within 0.1 s.

No worker may outlive the engine, however it ends. The operating system kills the forkserver when the engine
is gone, and the workers when the forkserver is gone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from nbgpu.engine.data.datasets import Volumes
from nbgpu.engine.data.decoding import opened
from nbgpu.engine.data.sampling import Draw, Sample
from nbgpu.engine.frames import error_as_text
from nbgpu.engine.memory import dev_shm
from nbgpu.errors import DataError, RunError
from nbgpu.machine.processes import signal_name

_PR_SET_PDEATHSIG = 1


class DataWorkerError(RuntimeError):
    """An error of a worker process; the message has its traceback."""


class Visit(NamedTuple):
    """One use of a volume in an epoch."""

    volume: int
    epoch: int
    number: int
    """The visit's position among the rank's visits of an epoch."""


@dataclass(frozen=True)
class Failed:
    """The result of a failed visit: an exception that one process can send to another."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Wrap an error: a DataError unchanged, any other as text, because it would lose its chain when it is
        sent."""
        if isinstance(error, DataError):
            return cls(error)
        return cls(DataWorkerError(f"in a worker process that reads data:\n{error_as_text(error).rstrip()}"))


class Visits(Dataset[list[Sample]]):
    """The samples of visits; `dataset[visit]` depends only on the visit.

    Args:
        volumes: the rank's volumes.
        draw: makes the samples of a volume.
        seed, rank: make, with a visit's epoch and number, the seed of its random numbers.
    """

    def __init__(self, volumes: Volumes, draw: Draw, seed: int, rank: int) -> None:
        self._volumes = volumes
        self._draw = draw
        self._seed = seed
        self._rank = rank

    def __getitem__(self, visit: Visit) -> list[Sample]:
        seed = np.random.SeedSequence([self._seed, self._rank, visit.epoch, visit.number])
        return self._draw(opened(self._volumes[visit.volume]), seed)


def prepare(modules: Iterable[str]) -> ForkServerContext:
    """Start the forkserver if it is not running yet, without waiting for it. Call on the main thread.

    Args:
        modules: the modules that workers need beside this one; the forkserver imports them once for all
            workers.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *sorted(modules)])
    forkserver.ensure_running()
    return context


class WorkerProcesses:
    """Worker processes that prepare visits ahead of time, in order.

    Args:
        visits: the dataset of the samples of each visit; it is sent to each worker.
        context: the result of `prepare`, which starts processes from the forkserver.
        num_workers: the number of processes.
        prefetch: the number of visits that each worker prepares ahead.
        stay: whether the processes stay for the next `samples_of`.
        rank: the rank's number, for messages.
    """

    def __init__(
        self,
        visits: Dataset[list[Sample]],
        context: ForkServerContext,
        *,
        num_workers: int,
        prefetch: int,
        stay: bool,
        rank: int,
    ) -> None:
        self._visits: list[Any] = []
        """The visits of the present epoch, in the order in which the workers prepare them."""
        self._rank = rank
        self._stay = stay
        self._loader: DataLoader[Any] | None = DataLoader(
            _FailuresAsResults(visits),
            batch_size=None,
            sampler=self._visits,
            num_workers=num_workers,
            prefetch_factor=prefetch,
            persistent_workers=stay,
            multiprocessing_context=context,
            collate_fn=_stacked,
            worker_init_fn=_begin,
            # its own, because the default one is shared with the model's random numbers
            generator=torch.Generator().manual_seed(0),
        )
        self._results: Any = None

    def samples_of(self, visits: Sequence[Any]) -> Iterator[list[Sample]]:
        """Yield the samples of each visit, in order.

        Raises:
            DataError: a volume could not be decoded.
            RunError: a worker process has ended.
        """
        assert self._loader is not None, "it was closed"
        # Changed in place, because persistent workers need the same DataLoader in each epoch, and with it the
        # same sampler.
        self._visits[:] = visits
        if not self._stay:
            self._end()
        try:
            self._results = iter(self._loader)
        except Exception as error:
            if failure := self._exited_workers():
                raise RunError(f"rank {self._rank}: {failure}") from error
            raise RunError(
                f"rank {self._rank}: the data cannot be sent to worker processes ({error}). Steps and items must be "
                "such as pickle takes; or set num_workers=0"
            ) from error
        for _ in visits:
            result = self._next()
            if isinstance(result, Failed):
                raise result.error
            num_samples = len(next(iter(result.values())))
            yield [{name: stack[i] for name, stack in result.items()} for i in range(num_samples)]
        if not self._stay:
            self._end()

    def _next(self) -> Any:
        """Return the next result of the workers; RunError that names the process if one has ended."""
        try:
            return next(self._results)
        except Exception as error:
            # If a worker has ended, this is the cause: its results did not arrive.
            if failure := self._exited_workers():
                raise RunError(f"rank {self._rank}: {failure}") from error
            raise

    def _exited_workers(self) -> str:
        """Return a sentence about worker processes that have ended; empty if all run."""
        processes = list(getattr(self._results, "_workers", ()))  # torch has no public name for them
        for process in processes:
            process.join(0.1)  # the exit code arrives a moment after the end
        gone = [(p.pid, p.exitcode) for p in processes if p.exitcode is not None]
        return "; ".join(
            f"the worker process {pid} that reads data {_describe_exit(code)}" for pid, code in gone
        )

    def close(self) -> None:
        """End the processes; may be called more than once."""
        self._end()
        self._loader = None

    def _end(self) -> None:
        """End the processes and drop the results on their way."""
        results, self._results = self._results, None
        if results is not None:
            # torch calls this private method when the last reference is gone, but the traceback of an error
            # may keep one.
            results._shutdown_workers()


def _describe_exit(code: int) -> str:
    """Return how a worker process has ended, and what to do; a negative code is the number of a signal."""
    if code >= 0:
        return f"ended with {code}; standard error has why. Set num_workers=0 to see it here"
    advice = "Set num_workers=0 to see where"
    if -code == signal.SIGKILL:
        advice = "The machine was perhaps out of memory: lower num_workers or prefetch"
    elif -code == signal.SIGBUS:
        advice = dev_shm.advice()
    return f"was killed by {signal_name(-code)}. {advice}"


class _FailuresAsResults(Dataset[Any]):
    """A dataset that returns an exception as a result: raised, torch would wrap it in another one that has
    the worker's traceback in its message."""

    def __init__(self, visits: Dataset[list[Sample]]) -> None:
        self._visits = visits

    def __getitem__(self, visit: Any) -> list[Sample] | Failed:
        try:
            return self._visits[visit]
        except Exception as error:  # noqa: BLE001 - the rank raises it
            return Failed.of(error)


def _stacked(samples: list[Sample] | Failed) -> Sample | Failed:
    """Return a visit's samples as one tensor for each name, because each tensor that is sent takes a file.

    The tensors are put into shared memory here. torch would do so on the thread that sends them, where an
    error is lost, and the rank would wait for ever.
    """
    if isinstance(samples, Failed):
        return samples
    try:
        return {
            name: torch.stack([sample[name] for sample in samples]).share_memory_() for name in samples[0]
        }
    except RuntimeError as error:
        return Failed(RunError(dev_shm.advice())) if dev_shm.is_full(error) else Failed.of(error)


def _begin(_: int) -> None:
    """Prepare a new worker process."""
    # Ctrl-C in a terminal reaches all processes. The rank decides how the run goes on, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    engine = multiprocessing.parent_process()
    if engine is not None and not engine.is_alive():
        os._exit(1)  # the forkserver ended before the line above


def _end_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if any("multiprocessing.forkserver" in part for part in sys.orig_argv):
    _end_with_parent()
