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
from itertools import groupby

HOLD_S = 0.25
"""The time for which a line waits for the other ranks."""
DISPLAY_HOLD_S = 1.0
"""The time for which displays of a rank that is done wait for the others: ranks that draw at once on a few
cores end their pictures one after the other. A rank that goes on is shown live."""
_DISPLAY = "display_data"

Item = tuple[str, str]
"""(kind, text): a line of 'stdout' or 'stderr', or a display as text that differs where two displays
differ."""


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
    """The number of items at the front that have waited long enough."""
    arrivals: deque[tuple[float, int]] = field(default_factory=deque)
    """The times at which the other items came, each with their number."""
    ended: bool = False
    at: int = 0
    """The number of items that were taken in this turn."""

    def ripen(self, came_before_s: float) -> None:
        """Count the items as ripe that came before a time."""
        while self.arrivals and self.arrivals[0][0] <= came_before_s:
            self.num_ripe += self.arrivals.popleft()[1]

    def ripen_displays(self) -> None:
        """Let displays at the front wait no longer."""
        if self.num_ripe == 0 and self.head is not None and self.head[0] == _DISPLAY:
            self.num_ripe = self.arrivals.popleft()[1]

    @property
    def hold_s(self) -> float:
        """The time, in seconds, for which an item waits for other ranks to print the same."""
        waits_longer = self.ended and any(kind == _DISPLAY for kind, _ in self.items)
        return DISPLAY_HOLD_S if waits_longer else HOLD_S

    @property
    def head(self) -> Item | None:
        return self.items[self.at] if self.at < len(self.items) else None

    @property
    def head_is_ripe(self) -> bool:
        return self.at < self.num_ripe

    @property
    def has_ripe_display(self) -> bool:
        return any(kind == _DISPLAY for kind, _ in self.items[: self.num_ripe])

    def drop_taken(self) -> None:
        """Remove the items that were taken in this turn, and count the ripe ones anew."""
        del self.items[: self.at]
        self.num_ripe -= self.at
        # Items that were taken before they were ripe are the oldest of those.
        early, self.num_ripe = -min(0, self.num_ripe), max(0, self.num_ripe)
        while early:
            came_s, count = self.arrivals.popleft()
            if count > early:
                self.arrivals.appendleft((came_s, count - early))
            early -= min(early, count)
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
        """Note that nothing more will come from this rank, so that the lines of the others need not wait for
        it."""
        self._queues[rank].ended = True

    def take(self, now_s: float) -> list[Block]:
        """Take the blocks that can be shown now."""
        talking = {rank: queue for rank, queue in self._queues.items() if queue.items or not queue.ended}
        if not any(queue.items for queue in talking.values()):
            return []
        nobody_to_wait_for = len(talking) == 1 or all(queue.ended for queue in talking.values())
        for queue in talking.values():
            queue.ripen(math.inf if nobody_to_wait_for else now_s - queue.hold_s)
        if any(queue.has_ripe_display for queue in talking.values()):
            # Whichever rank was first, displays that are there are shown in the order of the ranks.
            for queue in talking.values():
                queue.ripen_displays()
        blocks = list(_blocks(_ready_blocks(talking)))
        for queue in talking.values():
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
    """The items that several ranks have, and for each item the number of ranks that it has not been taken
    from."""

    def __init__(self, to_say: Mapping[int, list[Item]]) -> None:
        several = _items_of_several_ranks(to_say.values())
        self._left = {
            rank: Counter(item for item in items if item in several) if several else Counter[Item]()
            for rank, items in to_say.items()
        }
        self.num_ranks = Counter(item for left in self._left.values() for item in left)
        self.items = several

    def remove(self, rank: int, item: Item) -> None:
        """Note that an item was taken from a rank."""
        self._left[rank][item] -= 1
        if self._left[rank][item] == 0:
            self.num_ranks[item] -= 1


def _ready_blocks(talking: Mapping[int, _Queue]) -> Iterator[tuple[tuple[int, ...], Sequence[Item]]]:
    """Yield (ranks, items) in the order in which they are shown, and advance the queues.

    The beginning that all ranks have in common comes first, in one piece. Then the ranks take turns: each
    yields the ripe items that only it has, and an item that several have is yielded once for all of them.
    """
    same = _num_same([queue.items for queue in talking.values()])
    if same:
        yield tuple(talking), next(iter(talking.values())).items[:same]
        for queue in talking.values():
            queue.at = same
    shared = _Shared({rank: queue.items[same:] for rank, queue in talking.items()})
    went_on = True
    while went_on:
        went_on = False
        for rank, queue in talking.items():
            start, end = queue.at, _end_of_single_rank_run(queue, shared.items)
            if end > start:
                queue.at = end
                yield (rank,), queue.items[start:end]
                went_on = True
        if ranks := _next_together(talking, shared):
            item = talking[ranks[0]].items[talking[ranks[0]].at]
            yield tuple(ranks), [item]
            for rank in ranks:
                talking[rank].at += 1
                shared.remove(rank, item)
            went_on = True


def _num_same(lists: Sequence[list[Item]]) -> int:
    """Return the number of items in the common beginning of all lists. The end is found by bisection over
    slices, which Python compares in C."""
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
    """Return the index behind the ripe items at the front that no other rank has."""
    if not shared:
        return max(queue.at, queue.num_ripe)
    at = queue.at
    while at < queue.num_ripe and queue.items[at] not in shared:
        at += 1
    return at


def _next_together(talking: Mapping[int, _Queue], shared: _Shared) -> list[int]:
    """Return ranks whose next item is the same and can be shown now; empty where it is better to wait."""
    ranks_by_head: dict[Item, list[int]] = {}
    for rank, queue in talking.items():
        if queue.head is not None:
            ranks_by_head.setdefault(queue.head, []).append(rank)
    crossing: list[int] = []
    for item, ranks in ranks_by_head.items():
        if item not in shared.items:
            # `_ready_blocks` yields an item of one rank once it is ripe. After that, a shared item may be the
            # next one for all ranks that have it.
            continue
        is_ripe = any(talking[rank].head_is_ripe for rank in ranks)
        all_are_here = len(ranks) == shared.num_ranks[item]
        nobody_else_could = all(queue.ended for rank, queue in talking.items() if rank not in ranks)
        if all_are_here and (is_ripe or nobody_else_could):
            return ranks
        if is_ripe and not all_are_here:
            crossing = crossing or ranks
    # Two ranks print two lines in opposite order.
    return crossing if all(item in shared.items for item in ranks_by_head) else []


def _blocks(runs: Iterable[tuple[tuple[int, ...], Sequence[Item]]]) -> Iterator[Block]:
    """Join consecutive items of the same ranks in the same stream."""
    open_block: Block | None = None
    for ranks, items in runs:
        for kind, run in groupby(items, key=lambda item: item[0]):
            texts = [text for _, text in run]
            if open_block is not None and (open_block.ranks, open_block.kind) == (ranks, kind):
                open_block.texts += texts
                continue
            if open_block is not None:
                yield open_block
            open_block = Block(ranks, kind, texts)
    if open_block is not None:
        yield open_block
