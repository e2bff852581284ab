"""The random numbers that cells draw: those of each rank are its own.

torch's generator is seeded when torch is imported, which happens before the engines are forked: left alone, all ranks
would draw the same numbers, and so train on the same random batch. Processes that torchrun starts import torch on their
own, and draw different ones.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_cells(cell_seed: int | None, rank: int) -> None:
    """Seed the generators of this process: torch's on the CPU and on GPUs, NumPy's global one and Python's.

    Args:
        cell_seed: the cluster's setting; None takes what the operating system gives, so that no two processes draw the same.
        rank: makes another seed of it for each rank.
    """
    if cell_seed is None:
        # Those of GPUs are made when CUDA is first used, after the fork, and seeded like this then.
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
        # Without touching a GPU: torch remembers it until CUDA is first used.
        torch.cuda.manual_seed_all(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)
