"""Merge the output of several ranks: a line that several ranks print is shown once, with their numbers.

The lines of one rank always keep their order. A line waits a moment for the other ranks to print the same
one; lines that they do not print appear in blocks, one rank after the other. Displays of a rank that is done
wait a little longer, for those of the ranks before it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter

from nbgpu.text.ranks import ranks_by

HOLD_S = 0.25
"""The time for which a line waits for the other ranks."""
DISPLAY_HOLD_S = 1.0
"""The time for which displays of a rank that has ended wait for those of other ranks, which need longer if
ranks that draw at once share few cores. The displays of a rank that goes on are shown live."""
_DISPLAY = "display_data"

Item = tuple[str, str]
"""(kind, text): a line of 'stdout' or 'stderr', or a display, whose texts are equal if the displays are."""


@dataclass
class Block:
    """Consecutive lines of one stream from the same ranks."""

    ranks: tuple[int, ...]
    kind: str
    texts: list[str]


@dataclass
class _Queue:
    """The items of one rank that wait to be shown, in the order in which the rank printed them. An item is
    ripe once it has waited long enough for other ranks."""

    items: list[Item] = field(default_factory=list)
    num_ripe: int = 0
    """The number of ripe items, which are at the front."""
    arrivals: deque[tuple[float, int]] = field(default_factory=deque)
    """(the time of arrival in seconds, the number of items) for the items behind the ripe ones."""
    ended: bool = False
    at: int = 0
    """The number of items that were taken in the present call of `Merger.take`, and the next one's index."""

    def ripen(self, came_before_s: float) -> None:
        """Make the items ripe that came before this time."""
        while self.arrivals and self.arrivals[0][0] <= came_before_s:
            self.num_ripe += self.arrivals.popleft()[1]

    def ripen_displays(self) -> None:
        """Make displays at the front ripe."""
        if self.num_ripe == 0 and self.head is not None and self.head[0] == _DISPLAY:
            self.num_ripe = self.arrivals.popleft()[1]

    @property
    def hold_s(self) -> float:
        """The time in seconds for which an item waits for other ranks to print the same."""
        waits_longer = self.ended and any(kind == _DISPLAY for kind, _ in self.items)
        return DISPLAY_HOLD_S if waits_longer else HOLD_S

    @property
    def head(self) -> Item | None:
        """The next item; None if all are taken."""
        return self.items[self.at] if self.at < len(self.items) else None

    @property
    def head_is_ripe(self) -> bool:
        return self.at < self.num_ripe

    @property
    def has_ripe_display(self) -> bool:
        return any(kind == _DISPLAY for kind, _ in self.items[: self.num_ripe])

    def drop_taken(self) -> None:
        """Remove the items that were taken, and count the ripe ones anew."""
        del self.items[: self.at]
        # Items that were taken although they were not ripe are the oldest in `arrivals`.
        num_unripe = max(0, self.at - self.num_ripe)
        self.num_ripe = max(0, self.num_ripe - self.at)
        while num_unripe:
            came_s, count = self.arrivals.popleft()
            if count > num_unripe:
                self.arrivals.appendleft((came_s, count - num_unripe))
            num_unripe -= min(num_unripe, count)
        self.at = 0


class Merger:
    """Merges the lines of several ranks.

    Args:
        ranks: the ranks that may print.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._queues = {rank: _Queue() for rank in sorted(ranks)}

    def add(self, rank: int, items: Sequence[Item], now_s: float) -> None:
        """Add lines and displays of a rank."""
        if items:
            queue = self._queues[rank]
            queue.items += items
            queue.arrivals.append((now_s, len(items)))

    def end(self, rank: int) -> None:
        """Note that this rank has ended, so that the lines of the others no longer wait for it."""
        self._queues[rank].ended = True

    def take(self, now_s: float) -> list[Block]:
        """Take the blocks that can be shown now."""
        queues = {rank: queue for rank, queue in self._queues.items() if queue.items or not queue.ended}
        if not any(queue.items for queue in queues.values()):
            return []
        is_alone = len(queues) == 1 or all(queue.ended for queue in queues.values())
        for queue in queues.values():
            queue.ripen(math.inf if is_alone else now_s - queue.hold_s)
        if any(queue.has_ripe_display for queue in queues.values()):
            # Displays that are there appear in the order of the ranks, whichever rank was first.
            for queue in queues.values():
                queue.ripen_displays()
        blocks = list(_blocks(_take_ready(queues)))
        for queue in queues.values():
            queue.drop_taken()
        return blocks

    def drain(self) -> dict[int, list[Item]]:
        """Take all waiting items, by rank."""
        waiting = {rank: queue.items for rank, queue in self._queues.items()}
        self._queues = {rank: _Queue(ended=queue.ended) for rank, queue in self._queues.items()}
        return waiting


def merged(items_by_rank: Mapping[int, Sequence[Item]]) -> list[Block]:
    """Merge all lines of ranks that have ended."""
    merger = Merger(items_by_rank)
    for rank, items in items_by_rank.items():
        merger.add(rank, items, 0.0)
        merger.end(rank)
    return merger.take(0.0)


class _Shared:
    """The items that more than one rank has.

    Attributes:
        items: these items.
        num_ranks: for each item the number of ranks from which it is still to be taken.
    """

    def __init__(self, items_by_rank: Mapping[int, list[Item]]) -> None:
        self.items = _items_of_several_ranks(items_by_rank.values())
        self._left = {
            rank: Counter(item for item in items if item in self.items) if self.items else Counter[Item]()
            for rank, items in items_by_rank.items()
        }
        self.num_ranks = Counter(item for left in self._left.values() for item in left)

    def remove(self, rank: int, item: Item) -> None:
        """Note that an item was taken from a rank."""
        self._left[rank][item] -= 1
        if self._left[rank][item] == 0:
            self.num_ranks[item] -= 1


def _take_ready(queues: Mapping[int, _Queue]) -> Iterator[tuple[tuple[int, ...], Sequence[Item]]]:
    """Yield (ranks, items) in the order in which they are shown, and advance the queues.

    The beginning that all ranks have in common comes first, in one piece. Then the ranks take turns: each
    yields the ripe items that only it has, and an item that several have is yielded once for all of them.
    """
    num_same = _num_same([queue.items for queue in queues.values()])
    if num_same:
        yield tuple(queues), next(iter(queues.values())).items[:num_same]
        for queue in queues.values():
            queue.at = num_same
    shared = _Shared({rank: queue.items[num_same:] for rank, queue in queues.items()})
    has_advanced = True
    while has_advanced:
        has_advanced = False
        for rank, queue in queues.items():
            start, end = queue.at, _end_of_single_rank_run(queue, shared.items)
            if end > start:
                queue.at = end
                yield (rank,), queue.items[start:end]
                has_advanced = True
        if ranks := _ranks_with_shared_head(queues, shared):
            item = queues[ranks[0]].items[queues[ranks[0]].at]
            yield tuple(ranks), [item]
            for rank in ranks:
                queues[rank].at += 1
                shared.remove(rank, item)
            has_advanced = True


def _num_same(lists: Sequence[list[Item]]) -> int:
    """Return the length of the common prefix of all lists, by bisection over slices, which Python compares in
    C."""
    first, *others = lists
    low, high = 0, min(map(len, lists))
    if all(other[:high] == first[:high] for other in others):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if all(other[low:middle] == first[low:middle] for other in others):
            low = middle
        else:
            high = middle - 1
    return low


def _items_of_several_ranks(lists: Iterable[list[Item]]) -> set[Item]:
    """Return the items that are in more than one of the lists."""
    seen: set[Item] = set()
    several: set[Item] = set()
    for items in lists:
        of_one = set(items)
        several |= seen & of_one
        seen |= of_one
    return several


def _end_of_single_rank_run(queue: _Queue, shared: set[Item]) -> int:
    """Return the end of the next ripe items that no other rank has, as an index of `queue.items`."""
    if not shared:
        return max(queue.at, queue.num_ripe)
    at = queue.at
    while at < queue.num_ripe and queue.items[at] not in shared:
        at += 1
    return at


def _ranks_with_shared_head(queues: Mapping[int, _Queue], shared: _Shared) -> list[int]:
    """Return ranks whose next item is the same shared item, if it can be shown now; otherwise an empty
    list."""
    ranks_by_head = ranks_by((queue.head, rank) for rank, queue in queues.items() if queue.head is not None)
    crossing: list[int] = []
    for item, ranks in ranks_by_head.items():
        if item not in shared.items:
            continue  # `_take_ready` yields it once it is ripe
        is_ripe = any(queues[rank].head_is_ripe for rank in ranks)
        is_complete = len(ranks) == shared.num_ranks[item]
        others_have_ended = all(queue.ended for rank, queue in queues.items() if rank not in ranks)
        if is_complete and (is_ripe or others_have_ended):
            return ranks
        if is_ripe and not is_complete:
            crossing = crossing or ranks
    # If every next item is shared and none is complete, ranks printed the same lines in different orders. One
    # of the items is then shown for its present ranks alone, so that the output goes on.
    return crossing if all(item in shared.items for item in ranks_by_head) else []


def _blocks(runs: Iterable[tuple[tuple[int, ...], Sequence[Item]]]) -> Iterator[Block]:
    """Join consecutive items of the same ranks in the same stream."""
    parts = (
        (ranks, kind, [text for _, text in part])
        for ranks, items in runs
        for kind, part in groupby(items, key=itemgetter(0))
    )
    for (ranks, kind), same in groupby(parts, key=itemgetter(0, 1)):
        yield Block(ranks, kind, list(chain.from_iterable(texts for _, _, texts in same)))
