"""Conversion of moments from the clocks of all ranks' hosts to the clock of rank 0."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbgpu.protocol.records import CLOCKS, MAX_NUMBER, Event, Sample


@dataclass(frozen=True)
class ClockComparison:
    """The offsets between the clocks of the ranks at one moment."""

    at_s: float
    """The time of the comparison, by the clock of rank 0."""
    offsets_s: Sequence[float]
    """By rank, the seconds to add to its clock to get the clock of rank 0."""
    errors_s: Sequence[float]
    """By rank, the largest error of the offset; 0 for a rank that reads the clock of rank 0 itself."""


class Clocks:
    """Converts times of all ranks' clocks to the clock of rank 0.

    Between two comparisons the offsets are interpolated linearly, because quartz clocks run at constant but
    different rates.

    Args:
        comparisons: in any order; empty if all ranks read one clock.
    """

    def __init__(self, comparisons: Iterable[ClockComparison] = ()) -> None:
        self._comparisons = sorted(comparisons, key=lambda c: c.at_s)

    @classmethod
    def of(cls, records: Iterable[Sample | Event], world_size: int) -> Clocks:
        """Build the clocks from the comparisons that a run's ranks recorded. Damaged records are left out."""
        return cls(
            comparison
            for record in records
            if isinstance(record, Event) and record.kind == CLOCKS
            for comparison in _read(record, world_size)
        )

    def of_rank_0(self, rank: int, at_s: float) -> float:
        """Convert a time of a rank's clock to the clock of rank 0."""
        comparisons = self._comparisons
        if not comparisons:
            return at_s
        after = bisect_right(comparisons, at_s + comparisons[0].offsets_s[rank], key=lambda c: c.at_s)
        if after in (0, len(comparisons)):
            return at_s + comparisons[max(0, after - 1)].offsets_s[rank]
        before, later = comparisons[after - 1], comparisons[after]
        share = (at_s + before.offsets_s[rank] - before.at_s) / (later.at_s - before.at_s)
        return at_s + before.offsets_s[rank] + share * (later.offsets_s[rank] - before.offsets_s[rank])

    @property
    def error_s(self) -> float:
        """The largest error of any rank's clock."""
        return max((error for c in self._comparisons for error in c.errors_s), default=0.0)

    def in_words(self) -> str:
        """Return a sentence: all ranks read one clock, or the largest offset with its error."""
        if self.error_s == 0:
            return "all ranks read the clock of one machine: offset 0, exactly"
        most_s = max((offset for c in self._comparisons for offset in c.offsets_s), key=abs)
        return (
            f"clocks of several machines: offsets of up to {1e6 * abs(most_s):.0f} us were corrected, with an error of at "
            f"most {1e6 * self.error_s:.0f} us"
        )


def _read(event: Event, world_size: int) -> Iterable[ClockComparison]:
    """Yield the comparison that an event records; none if the event is damaged."""
    offsets_s, errors_s = event.detail.get("offsets_s"), event.detail.get("errors_s")
    at_s = event.detail.get("at_s")
    if _are_seconds(offsets_s, world_size) and _are_seconds(errors_s, world_size) and _are_seconds([at_s], 1):
        yield ClockComparison(at_s, offsets_s, errors_s)  # type: ignore[arg-type]


def _are_seconds(values: object, count: int) -> bool:
    """Return whether a value is a list of `count` numbers that can be times."""
    return (
        type(values) is list
        and len(values) == count
        and all(type(value) in (int, float) and abs(value) <= MAX_NUMBER for value in values)
    )
