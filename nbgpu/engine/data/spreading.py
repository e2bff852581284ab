"""Spreads rare volumes evenly: over the ranks for a whole run, and over the micro-batches of each epoch.

In a cohort in which one patient in twenty has the event, a random batch of 24 has none in three batches of
ten, and Cox's partial likelihood learns nothing from it. As the samples of all ranks form one risk set, a
micro-batch here is that of all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Anything = TypeVar("Anything")


def dealt(
    things: Sequence[Anything], rare: Sequence[bool], num_ranks: int, seed: int, padded: bool
) -> list[list[Anything]]:
    """Return the share of each rank. The rare things are dealt out first, so that the numbers of them differ
    by one at most.

    Args:
        things: in any order, the same on every rank.
        rare: whether each of them is rare.
        num_ranks: the number of ranks, at most that of the things.
        seed: the seed of the order in which they are dealt.
        padded: whether all shares have the same length; the first things are then in two shares.
    """
    order = np.random.RandomState(seed).permutation(len(things)).tolist()
    order.sort(key=lambda index: not rare[index])
    if padded:
        order += order[: -len(order) % num_ranks]
    return [[things[index] for index in order[rank::num_ranks]] for rank in range(num_ranks)]


def chosen(rare: Sequence[bool], num_visits: int, rng: np.random.RandomState) -> tuple[list[int], list[int]]:
    """Return (the rare things that an epoch visits, the others that it visits), by number.

    Each thing is visited the same number of times, and the rest of the visits goes to things that are not
    rare if there are any. So every rank knows the number of rare things that another one visits.
    """
    rare_ones = [number for number, is_rare in enumerate(rare) if is_rare]
    others = [number for number, is_rare in enumerate(rare) if not is_rare]
    num_rare = num_rare_visits(len(rare_ones), len(rare), num_visits)
    return _in_rounds(rare_ones, num_rare, rng), _in_rounds(others, num_visits - num_rare, rng)


def num_rare_visits(num_rare: int, num_things: int, num_visits: int) -> int:
    """Return how many of an epoch's visits are to rare things."""
    if num_rare == num_things:
        return num_visits
    return min(num_visits, max(1, num_visits // num_things) * num_rare)


def _in_rounds(numbers: Sequence[int], count: int, rng: np.random.RandomState) -> list[int]:
    """Return `count` of the numbers in random order, each once before any comes twice."""
    found: list[int] = []
    while len(found) < count:
        found += [numbers[place] for place in rng.permutation(len(numbers))]
    return found[:count]


def micro_batches_of_rare(
    num_rare: Sequence[int], rank: int, num_batches: int, batch_size: int, rng: np.random.RandomState
) -> list[int]:
    """Return the number of rare things in each micro-batch of a rank. If all ranks together have at least as
    many rare things as an epoch has micro-batches, each micro-batch gets one.

    Args:
        num_rare: the rare things of each rank, which differ by few.
        rank: the rank whose numbers are returned.
        num_batches: the micro-batches of an epoch.
        batch_size: the samples of a rank in a micro-batch, and so the most rare ones.
        rng: draws the micro-batches that get more than others, alike on all ranks.
    """
    order = rng.permutation(num_batches)
    counts = [0] * num_batches
    for turn in range(num_rare[rank]):
        # The ranks take turns, and the ranks that have more take the last ones.
        # The position of this thing among those of all ranks; the position decides the micro-batch.
        before = sum(min(count, turn + (other < rank)) for other, count in enumerate(num_rare))
        counts[order[before * num_batches // sum(num_rare)]] += 1
    for index in range(num_batches):
        while counts[index] > batch_size:
            emptiest = min(range(num_batches), key=counts.__getitem__)
            counts[index] -= 1
            counts[emptiest] += 1
    return counts
