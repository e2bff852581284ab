"""Who waits for whom in a cell that does not come to its end, in words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import ipyparallel as ipp

from nbgpu.client.whereabouts import Lookout, told
from nbgpu.records import Whereabouts

_LONGEST_PERIOD_S = 1.0
_PERIODS_BEFORE_NOTICE = 5
_SILENCE_WORTH_SAYING_S = 1.0


@dataclass(frozen=True)
class Place:
    """Where one rank is, as far as a cell is concerned."""

    where: Whereabouts | None = None
    """None where it has not answered in this cell, or has nothing to do with it any more."""
    for_s: float = 0.0
    """How long it has been there, with nothing going through its process groups."""
    instead: str = ""
    """What is said of it in place of where it is: 'has finished the cell'."""

    @property
    def waits(self) -> bool:
        return self.where is not None and bool(self.where.collective) and not self.instead

    @property
    def words(self) -> str:
        """What goes behind the rank's name."""
        if self.instead:
            return self.instead
        if self.where is None:
            return "has not answered yet"
        if self.waits:
            return f"{self.kind}, for {self.for_s:.0f} s"
        return self.kind

    @property
    def kind(self) -> str:
        """The same without its length, which tells ranks apart that came to one place at different times."""
        if self.instead or self.where is None:
            return self.words
        if self.waits:
            return f"waits in {self.where.collective}, {self.where.place}"
        return f"is {'' if self.where.doing == 'idle' else 'at '}{told(self.where)}"


def notice(places: Mapping[int, Place], after_s: float) -> str:
    """Who waits where and who does not; empty unless a rank waits in a collective for `after_s` seconds.

    'rank 0 waits in all_reduce, cell line 4, for 7 s; rank 1 has finished the cell'
    """
    if not any(place.waits and place.for_s >= after_s for place in places.values()):
        return ""
    ranks_by_kind: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_by_kind.setdefault(place.kind, []).append(rank)
    all_wait = all(place.waits for place in places.values())
    parts = []
    for ranks in ranks_by_kind.values():
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        if all_wait and len(ranks) == len(places) > 1:
            named = "all ranks"
        words = min((places[rank] for rank in ranks), key=lambda place: place.for_s).words
        parts.append(f"{named} {words if len(ranks) == 1 else _plural(words)}")
    return "; ".join(parts) + (": they wait for each other" if all_wait and len(parts) > 1 else "")


def _plural(words: str) -> str:
    first, _, rest = words.partition(" ")
    plural = {"waits": "wait", "is": "are", "has": "have", "does": "do", "was": "were"}.get(first, first)
    return f"{plural} {rest}"


class HangWatch:
    """Follows where the ranks of a cell are.

    Args:
        lookout: asks them.
        results: by rank, of the cell.
        world_size: how many ranks there are; some may not have been given the cell.
        notice_after_s: how long ranks wait in a collective before that is worth saying; 0 for never.
    """

    def __init__(
        self, lookout: Lookout, results: Mapping[int, ipp.AsyncResult], world_size: int, notice_after_s: float
    ) -> None:
        self._lookout = lookout
        self._results = results
        self._world_size = world_size
        self._notice_after_s = notice_after_s
        self._period_s = min(_LONGEST_PERIOD_S, notice_after_s / _PERIODS_BEFORE_NOTICE or _LONGEST_PERIOD_S)
        self._asked_mono_s = time.monotonic()
        self._here_since: dict[int, tuple[Whereabouts, float]] = {}
        self.text = ""
        """The notice; empty while there is nothing to say."""

    def check(self) -> None:
        """Takes what the ranks have answered and asks them again, about once a second. Does not wait."""
        self._lookout.collect()
        for rank, seen in list(self._lookout.seen.items()):
            if rank not in self._here_since or self._here_since[rank][0] != seen.where:
                self._here_since[rank] = seen.where, seen.mono_s
        now_s = time.monotonic()
        if now_s - self._asked_mono_s < self._period_s:
            return
        self._asked_mono_s = now_s
        self._lookout.ask()
        if self._notice_after_s:
            places = {rank: self._place(rank) for rank in range(self._world_size)}
            self.text = notice(places, self._notice_after_s)

    def ask(self) -> None:
        """Asks now, so that a rank that does not answer is known as such a moment later."""
        self._lookout.ask()

    def describe(self, rank: int) -> str:
        """Where a rank is that did not come back, in words that go behind its name."""
        place = self._place(rank)
        if place.instead and (line := self._lookout.cell_line(rank)) is not None:
            return f"{place.words}, at cell line {line}"
        return place.words

    def _place(self, rank: int) -> Place:
        if rank not in self._results:
            return Place(instead="was not given the cell")
        if self._results[rank].ready():
            return Place(instead="has finished the cell")
        if self._lookout.silent_s(rank) > _SILENCE_WORTH_SAYING_S:
            return Place(instead=self._lookout.silence(rank))
        if rank not in self._here_since:
            return Place()
        where, since_mono_s = self._here_since[rank]
        return Place(where, time.monotonic() - since_mono_s)

    def close(self) -> None:
        self._lookout.close()
