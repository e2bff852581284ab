"""The random number generators of this process, for cells (different on each rank) and for runs.

torch's generator is seeded when torch is imported, which happens before the engines are forked: without
another seed, all ranks would draw the same numbers, and so train on the same random batch. Processes that
torchrun starts import torch themselves, and draw different numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

# Engines start without the settings of training, which take a tenth of a second to import.
if TYPE_CHECKING:
    from nbgpu.config import TrainConfig


def seed_cells(cell_seed: int | None, rank: int) -> None:
    """Seed the generators of this process: torch's on the CPU and on GPUs, NumPy's global one and Python's.

    Args:
        cell_seed: the cluster's setting; None takes a seed from the operating system, so that all processes
            draw different numbers.
        rank: the rank, which gives each rank a different seed.
    """
    if cell_seed is None:
        # Generators of GPUs are made when CUDA is first used, after the fork, and seeded in this way then.
        torch.default_generator.seed()
        np.random.seed()
        random.seed()
        return
    numpy_seed, python_seed, *halves = (
        int(part) for part in np.random.SeedSequence([cell_seed, rank]).generate_state(4, np.uint32)
    )
    torch_seed = halves[0] << 32 | halves[1]
    torch.default_generator.manual_seed(torch_seed)
    if torch.backends.cuda.is_built():
        # This touches no GPU: torch keeps the seed until CUDA is first used.
        torch.cuda.manual_seed_all(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


@contextmanager
def kept(of_gpus: bool = True) -> Iterator[None]:
    """Restore the cells' generators after a block, whatever draws or seeds in it, such as imports or a
    recipe's file.

    Args:
        of_gpus: also restore torch's generators on GPUs, which needs CUDA.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=None if of_gpus else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators on the CPU for a block, and restore them at its end."""
    with kept(of_gpus=False):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield


def seed_step(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Seed the generators that a training step draws from (torch's, NumPy's, Python's), so that a step draws
    the same numbers whenever it is done."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    # Each of them by itself: torch.manual_seed takes a hundred times as long, most of it for devices that are
    # not used.
    torch.default_generator.manual_seed(int(torch_seed))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(torch_seed))
    np.random.seed(numpy_seed)
    random.seed(int(python_seed))


@dataclass(frozen=True)
class Place:
    """The position of a micro-batch among the samples of an optimizer step."""

    seed: tuple[int, ...]
    """The seed of the step: the same on every rank, and different for each step."""
    first_sample: int
    """The number of the micro-batch's first sample, counted over all ranks and micro-batches of the step."""


_place: Place | None = None


@contextmanager
def at(position: Place) -> Iterator[None]:
    """Let the function `place` return this position within the block."""
    global _place
    before, _place = _place, position
    try:
        yield
    finally:
        _place = before


def place() -> Place:
    """Return the position of the present micro-batch among the samples of its step, so that a recipe can draw
    the same numbers for a sample on every rank without an exchange.

    Outside of a run the position is 0, with a random seed. The seed is not drawn by torch, whose numbers have
    no value while memory is estimated from shapes alone.
    """
    return _place or Place((random.getrandbits(62),), 0)


@contextmanager
def seeded_run(config: TrainConfig) -> Iterator[None]:
    """Give a run seeded generators and its number of threads, and restore those of the cells at the end.

    The trainer seeds torch's generators, with which it draws the weights.
    """
    threads = torch.get_num_threads()
    with kept():
        random.seed(config.seed)
        np.random.seed(config.seed)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
