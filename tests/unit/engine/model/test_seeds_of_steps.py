"""What a training step draws at random: the same whenever it is done, and something else on each rank and in
each step."""

from __future__ import annotations

import random

import numpy as np
import torch

from nbgpu.engine.model import randomness

CPU = torch.device("cpu")


def drawn(seed: int, rank: int, step: int) -> tuple[float, float, float]:
    with randomness.kept(of_gpus=False):
        randomness.seed_step(seed, rank, step, CPU)
        return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_step_draws_the_same_whenever_it_is_done() -> None:
    assert drawn(3, 1, 7) == drawn(3, 1, 7)


def test_each_rank_and_step_and_seed_draws_something_else() -> None:
    places = [(seed, rank, step) for seed in (0, 1) for rank in range(3) for step in range(3)]
    for numbers in zip(*(drawn(*place) for place in places), strict=True):
        assert len(set(numbers)) == len(places)
