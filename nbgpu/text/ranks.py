"""Ranks as text."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def ranks_by(pairs: Iterable[tuple[Key, int]]) -> dict[Key, list[int]]:
    """Group ranks by a key, such as their message or host, from pairs (key, rank). Groups and ranks keep the
    order of the pairs."""
    ranks: dict[Key, list[int]] = {}
    for key, rank in pairs:
        ranks.setdefault(key, []).append(rank)
    return ranks


def count_of_ranks(number: int) -> str:
    """Return '1 rank', or '4 ranks'."""
    return f"{number} {'rank' if number == 1 else 'ranks'}"


def named_ranks(ranks: Iterable[int]) -> str:
    """Return 'rank 1', or 'ranks 0, 2'."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def named_ranges(ranks: Sequence[int]) -> str:
    """Return 'rank 1', or 'ranks 0-2,5' for ranks in ascending order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks)}"


def parse_ranges(text: str) -> list[int]:
    """Parse '0,2-3' into [0, 2, 3]; ValueError for any other text."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part!r} is neither a number nor a range")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return '0-2,5' for ranks in ascending order."""
    groups = consecutive(ranks)
    return ",".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers in groups of consecutive ones: [[0, 1, 2], [5]]."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
