"""nbgpu's trainer beside loops that were written by hand: they train at the same time, and one at a time.

All of them are started once, and each is let run for a few seconds while the others are stopped. What the
machine does besides then falls on neighbours alike, and a ratio of neighbours says more than one of runs that
came minutes apart.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.recipes.phantoms import phantom

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
LOOPS, TRAINER = (str(Path(__file__).with_name(name)) for name in ("loops.py", "trainer.py"))
PATCH_SIZE, NUM_PHANTOMS, BATCH_SIZE = 16, 128, 4
NUM_WARM_UP_STEPS = 20
NUM_TURNS = 12
_TURN_S = 3.0
_SETTLING_S = 0.5
"""At the beginning of a turn: what was stopped in the middle of a step ends it."""
_START_PATIENCE_S = 120.0
SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": PATCH_SIZE,
    "num_phantoms": NUM_PHANTOMS,
    "batch_size": BATCH_SIZE,
    "steps": 1_000_000,
    "val_fraction": 0,
    "val_every": 0,
    "checkpoint_every": 100,
    "threads": 1,
}


@dataclass(frozen=True)
class Job:
    """Ranks that train without an end, under torchrun."""

    torchrun: psutil.Process
    stamps: Path
    """When rank 0 computed each loss, by the monotonic clock, as float64 after float64."""
    output: Path
    """What its ranks print."""

    def send(self, number: signal.Signals) -> None:
        for process in self.torchrun.children(recursive=True):
            process.send_signal(number)

    def times_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.fromfile(self.stamps) if self.stamps.exists() else np.empty(0)

    def warm_up(self, name: str) -> None:
        """Waits for the first steps, and stops it."""
        give_up_s = time.monotonic() + _START_PATIENCE_S
        while len(self.times_s()) < NUM_WARM_UP_STEPS:
            if not self.torchrun.is_running() or time.monotonic() > give_up_s:
                raise RuntimeError(f"{name} does not train:\n{self.output.read_text()}")
            time.sleep(0.1)
        self.send(signal.SIGSTOP)

    def steps_per_second(self, seconds: float) -> float:
        """Lets it run for a while."""
        begun_s = time.monotonic()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        times_s = self.times_s()
        times_s = times_s[times_s > begun_s + _SETTLING_S]
        return float((len(times_s) - 1) / (times_s[-1] - times_s[0]))


Start = Callable[[Path], Sequence[str]]
"""Makes what torchrun is given, for a folder that the job has to itself; the stamps go to `stamps` in it."""


def in_turns(
    starts: Mapping[str, Start],
    num_turns: int = NUM_TURNS,
    turn_s: float = _TURN_S,
    note: Callable[[Mapping[str, Sequence[float]]], None] = lambda _: None,
    ends_s: float = math.inf,
) -> dict[str, list[float]]:
    """Steps per second of each, turn by turn; `note` is told after each turn what there is so far. Only the
    first turn may begin after `ends_s` of the monotonic clock."""
    rates: dict[str, list[float]] = {name: [] for name in starts}
    with ExitStack() as stack:
        # All of them start at the same time, because most of a start is waiting for files.
        jobs = {name: stack.enter_context(_running(start)) for name, start in starts.items()}
        for name, job in jobs.items():
            job.warm_up(name)
        for turn in range(num_turns):
            if turn and time.monotonic() > ends_s:
                break
            # Forth and back, so that neither is always the first.
            for name in list(jobs)[:: -1 if turn % 2 else 1]:
                rates[name].append(jobs[name].steps_per_second(turn_s))
            note(rates)
    return rates


@contextmanager
def _running(start: Start) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("wb") as output:
        command = start(Path(folder))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = psutil.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield Job(process, Path(folder, "stamps"), Path(folder, "output"))
        finally:
            for member in (*process.children(recursive=True), process):
                member.kill()
            process.wait()


@contextmanager
def volumes(patch_size: int, num_phantoms: int = NUM_PHANTOMS) -> Iterator[Path]:
    """A file with the phantoms that all of them train on."""
    with tempfile.TemporaryDirectory() as folder:
        stacked = torch.stack([torch.as_tensor(phantom(patch_size, 0, i)) for i in range(num_phantoms)])
        torch.save(stacked.reshape(num_phantoms, 1, *[patch_size] * 3).float(), Path(folder, "volumes.pt"))
        yield Path(folder, "volumes.pt")


def by_hand(
    who: str,
    file: Path,
    batch_size: int,
    keeps_memory: bool = False,
    *,
    num_ranks: int = 2,
    options: Sequence[str] = (),
) -> Start:
    """One of the loops in loops.py; 'fabric' and 'accelerate' may be in an environment of their own.

    With `keeps_memory` glibc is told what nbgpu tells it by itself (`engine/memory/heap.py`). `options` are
    the last arguments of loops.py.
    """
    python = sys.executable if who == "plain" or not PEERS_PYTHON.exists() else str(PEERS_PYTHON)
    told = ("env", f"MALLOC_TRIM_THRESHOLD_={2**40}", "MALLOC_MMAP_MAX_=0") if keeps_memory else ()

    def start(folder: Path) -> Sequence[str]:
        arguments = (who, str(file), str(batch_size), str(folder / "stamps"), *options)
        return [*told, *_torchrun(python, num_ranks, LOOPS, *arguments)]

    return start


def in_blocks(start: Start, block_steps: int, seconds: float) -> tuple[list[float], list[float]]:
    """Steps per second of the even and the odd blocks of one run, neighbours beside each other."""
    with _running(start) as job:
        job.warm_up("it")
        job.send(signal.SIGCONT)
        time.sleep(seconds)
        times_s = job.times_s()
    times_s = times_s[: len(times_s) // (2 * block_steps) * 2 * block_steps].reshape(-1, block_steps)
    # The first step of a block reads the last one of the block before.
    rates = (block_steps - 2) / (times_s[:, -1] - times_s[:, 1])
    num_dropped = 2 * -(-NUM_WARM_UP_STEPS // (2 * block_steps)) + 2
    return rates[num_dropped::2].tolist(), rates[num_dropped + 1 :: 2].tolist()


def ours(num_ranks: int = 2, options: Sequence[str] = (), gpus: str = "none", **settings: Any) -> Start:
    """nbgpu's trainer, with everything recorded as always; `options` are those of trainer.py."""

    def start(folder: Path) -> Sequence[str]:
        config = train_config("autoencoder", **{**SETTINGS, "runs_dir": str(folder), **settings})
        write_toml(folder / "run.toml", ClusterConfig(gpus=gpus), config)
        arguments = (str(folder / "run.toml"), str(folder / "stamps"), *options)
        return _torchrun(sys.executable, num_ranks, TRAINER, *arguments)

    return start


def _torchrun(python: str, num_ranks: int, *arguments: str) -> Sequence[str]:
    launcher = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    return [*launcher, *arguments]
