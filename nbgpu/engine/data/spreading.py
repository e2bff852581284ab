"""Spreads rare volumes evenly: over the ranks for a whole run, and over the micro-batches of each epoch.

In a cohort in which one patient in twenty has the event, three of ten random batches of 24 have no event, and
Cox's partial likelihood learns nothing from them. So events are spread over the micro-batches. The samples of
all ranks form one risk set, so that a micro-batch here is that of all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Volume = TypeVar("Volume")


def balanced_shares(
    volumes: Sequence[Volume], rare: Sequence[bool], num_ranks: int, seed: int, padded: bool
) -> list[list[Volume]]:
    """Return the share of each rank. The ranks take turns, for the rare volumes first, so that their numbers
    of rare ones differ by one at most.

    Args:
        volumes: in any order, the same on every rank.
        rare: whether each of them is rare.
        num_ranks: the number of ranks, at most that of the volumes.
        seed: the seed of the order in which they are taken.
        padded: whether all shares have the same length; the first volumes are then in two shares.
    """
    order = np.random.RandomState(seed).permutation(len(volumes)).tolist()
    order.sort(key=lambda index: not rare[index])
    if padded:
        order += order[: -len(order) % num_ranks]
    return [[volumes[index] for index in order[rank::num_ranks]] for rank in range(num_ranks)]


def draw_visits(
    rare: Sequence[bool], num_visits: int, rng: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Return (the rare volumes that an epoch visits, the others that it visits), by number, in random order.

    Each volume is visited the same number of times, and the remaining visits go to volumes that are not rare
    if there are any. So every rank can compute the number of rare volumes that another one visits.
    """
    rare_ones = [number for number, is_rare in enumerate(rare) if is_rare]
    others = [number for number, is_rare in enumerate(rare) if not is_rare]
    num_rare = num_rare_visits(len(rare_ones), len(rare), num_visits)
    return _in_rounds(rare_ones, num_rare, rng), _in_rounds(others, num_visits - num_rare, rng)


def num_rare_visits(num_rare: int, num_volumes: int, num_visits: int) -> int:
    """Return how many of a rank's visits in an epoch are to rare volumes."""
    if num_rare == num_volumes:
        return num_visits
    return min(num_visits, max(1, num_visits // num_volumes) * num_rare)


def _in_rounds(numbers: Sequence[int], count: int, rng: np.random.RandomState) -> list[int]:
    """Return `count` of the numbers in random order, each once before any comes twice."""
    drawn: list[int] = []
    while len(drawn) < count:
        drawn += [numbers[place] for place in rng.permutation(len(numbers))]
    return drawn[:count]


def micro_batches_of_rare(
    num_rare: Sequence[int], rank: int, num_batches: int, batch_size: int, rng: np.random.RandomState
) -> list[int]:
    """Return the number of rare samples in each micro-batch of a rank. If all ranks together have at least as
    many rare samples as an epoch has micro-batches, each micro-batch gets one.

    Args:
        num_rare: the number of rare samples of each rank in an epoch; the numbers differ by few.
        rank: the rank whose numbers are returned.
        num_batches: the micro-batches of an epoch.
        batch_size: the samples of a rank in a micro-batch, and so the most rare ones.
        rng: draws the micro-batches that get more than others; in the same state on all ranks.
    """
    order = rng.permutation(num_batches)
    counts = [0] * num_batches
    for turn in range(num_rare[rank]):
        # The rare samples of all ranks are counted as the ranks take turns, and this position decides the
        # micro-batch. In the last turns only the ranks that have more take part.
        position = sum(min(count, turn + (other < rank)) for other, count in enumerate(num_rare))
        counts[order[position * num_batches // sum(num_rare)]] += 1
    # A micro-batch with more rare samples than it has samples passes some to the one with the fewest.
    for index in range(num_batches):
        while counts[index] > batch_size:
            emptiest = min(range(num_batches), key=counts.__getitem__)
            counts[index] -= 1
            counts[emptiest] += 1
    return counts
