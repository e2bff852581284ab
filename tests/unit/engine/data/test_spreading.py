"""Rare volumes are spread over ranks and micro-batches, and nothing else changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from nbgpu.engine.data import spreading

CASES = [
    # (things, rare ones, ranks, micro-batches, samples of a rank in each)
    (480, 24, 2, 20, 12),
    (480, 24, 1, 20, 24),
    (96, 4, 2, 4, 12),
    (97, 7, 3, 4, 8),
    (30, 30, 2, 3, 5),
    (31, 29, 2, 4, 4),
    (10, 1, 2, 5, 1),
    (8, 3, 4, 6, 3),
]


@pytest.mark.parametrize(("num_things", "num_rare", "num_ranks", "num_batches", "batch_size"), CASES)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_micro_batch_is_without_a_rare_one_that_there_could_be(
    num_things: int, num_rare: int, num_ranks: int, num_batches: int, batch_size: int, padded: bool, seed: int
) -> None:
    rare = [index < num_rare for index in range(num_things)]
    shares = spreading.balanced_shares(range(num_things), rare, num_ranks, seed, padded)
    assert Counter(len(share) for share in shares).keys() <= {
        -(-num_things // num_ranks),
        num_things // num_ranks,
    }
    assert set().union(*shares) == set(range(num_things))
    of_ranks = [sum(rare[thing] for thing in share) for share in shares]
    assert max(of_ranks) - min(of_ranks) <= 1 + padded
    num_visits = num_batches * batch_size
    visited = [
        spreading.num_rare_visits(count, len(share), num_visits)
        for count, share in zip(of_ranks, shares, strict=True)
    ]
    counts = np.array(
        [
            spreading.micro_batches_of_rare(
                visited, rank, num_batches, batch_size, np.random.RandomState(seed)
            )
            for rank in range(num_ranks)
        ]
    )
    assert counts.sum(axis=1).tolist() == visited
    assert counts.min() >= 0
    assert counts.max() <= batch_size
    if sum(visited) >= num_batches:
        assert counts.sum(axis=0).min() >= 1
    else:
        assert counts.sum(axis=0).max() == 1


@pytest.mark.parametrize("num_visits", [3, 10, 12, 20, 25])
def test_an_epoch_visits_everything_as_evenly_as_it_can(num_visits: int) -> None:
    rare = [index in (2, 5) for index in range(10)]
    rare_ones, others = spreading.draw_visits(rare, num_visits, np.random.RandomState(0))
    assert len(rare_ones) + len(others) == num_visits
    assert len(rare_ones) == spreading.num_rare_visits(2, 10, num_visits)
    assert set(rare_ones) <= {2, 5}
    assert not set(others) & {2, 5}
    for visited, num in ((rare_ones, 2), (others, 8)):
        times = Counter(visited)
        assert max(times.values()) - (min(times.values()) if len(times) == num else 0) <= 1
