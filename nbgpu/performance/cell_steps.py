"""The ranks' work in a cell, from the times that each rank recorded.

A cell is treated as one long step: each rank computes until it waits in a collective. If all ranks waited in
the same collective, and no rank had the result before the last one joined, it follows which rank the others
waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbgpu.performance.clocks import Clocks
from nbgpu.performance.rank_steps import Blocked, Kind, RankStep, Span

_OF_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""The collectives that cannot end on any rank before all ranks have joined."""
_KINDS: dict[str, Kind] = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}


@dataclass(frozen=True, slots=True)
class _Wait:
    """An interval in which a rank had nothing to compute until a collective ended."""

    key: str
    """Identifies the collective on all ranks that took part in it; empty if the collective failed, or if it
    may end on one rank before another one has joined."""
    came_s: float
    """When the rank called the collective."""
    begin_s: float
    end_s: float
    name: str
    """The operation, such as 'all_reduce'."""


def cell_as_steps(number: int, notes: Mapping[int, Mapping[str, Any]], clocks: Clocks) -> list[RankStep]:
    """Return the cell as one step of each rank, in order of rank.

    Args:
        number: the number of the cell.
        notes: the times that each rank recorded, by rank (`nbgpu.engine.scaling.cell_timeline`).
        clocks: convert the ranks' clocks to that of rank 0.
    """
    # Ranks keep a limited number of records. The time for which some rank has dropped its records is left out
    # for all ranks.
    begun_s = max(_kept_from_s(rank, note, clocks) for rank, note in notes.items())
    ranks = [_Rank(rank, note, clocks, begun_s) for rank, note in sorted(notes.items())]
    common = _common(ranks, clocks.error_s)
    return [rank.step(number, common) for rank in ranks]


def num_forgotten(notes: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return (recorded collectives, called collectives) of the rank that has dropped most records."""
    return max(
        ((len(note["collectives"]), note["num_collectives"]) for note in notes), key=lambda n: n[1] - n[0]
    )


def _kept_from_s(rank: int, note: Mapping[str, Any], clocks: Clocks) -> float:
    """Return the time since when a rank's records are complete, by the clock of rank 0."""
    first_s = []
    if note["num_marks"] > len(note["marks"]):
        first_s.append(note["marks"][0][1])
    if note["num_collectives"] > len(note["collectives"]):
        first_s.append(note["collectives"][0]["came_s"])
    return clocks.of_rank_0(rank, max(first_s)) if first_s else float("-inf")


class _Rank:
    """One rank's part of the cell, by the clock of rank 0."""

    def __init__(self, rank: int, note: Mapping[str, Any], clocks: Clocks, begun_s: float) -> None:
        """Convert a rank's records to spans and waits by the clock of rank 0.

        Args:
            rank: the rank.
            note: the records of `cell_timeline`. `marks` are (part, when it began). Each of `collectives` has
                `came_s`, the time of the call; `since_s` and `until_s`, the wait for it in Python code, None
                if there was none; and `arrived_s`, when the result was available, None if not known.
            clocks: convert the ranks' clocks to that of rank 0.
            begun_s: records before this time are left out.
        """
        self.rank = rank
        # One shift serves the whole cell, which is too short for the clocks to drift apart.
        shift_s = clocks.of_rank_0(rank, note["ended_s"]) - note["ended_s"]
        ended_s = note["ended_s"] + shift_s
        marks = [(part, max(begun_s, at_s + shift_s)) for part, at_s in note["marks"]]
        ends_s = [at_s for _, at_s in marks[1:]] + [ended_s]
        self.parts: list[Span] = [
            Span(_KINDS.get(part, "other"), rank, begin_s, max(begin_s, end_s))
            for (part, begin_s), end_s in zip(marks, ends_s, strict=True)
        ]
        """The activities of the rank, without gaps."""
        self.sent: list[Span] = []
        """The collectives, from the call to the result."""
        self.waits: list[_Wait] = []
        # DDP's buckets: the record of the collective, its call, and when its result arrived.
        buckets: list[tuple[Mapping[str, Any], float, float]] = []
        for noted in note["collectives"]:
            came_s = noted["came_s"] + shift_s
            if came_s < begun_s:
                continue
            since_s, until_s = (
                None if noted[k] is None else noted[k] + shift_s for k in ("since_s", "until_s")
            )
            arrived_s = noted["arrived_s"]
            arrived_s = until_s if arrived_s is None else arrived_s + shift_s
            # A collective that was called in the backward pass, and that Python code did not wait for, is a
            # bucket of DDP.
            is_backward = any(s.kind == "backward" and s.begin_s <= came_s < s.end_s for s in self.parts)
            if since_s is not None:
                key = noted["key"] if until_s is not None and not noted["has_failed"] else ""
                self._wait(noted, key, came_s, since_s, ended_s if until_s is None else until_s)
            elif is_backward:
                buckets.append((noted, came_s, ended_s if arrived_s is None else arrived_s))
            if arrived_s is not None and not noted["has_failed"]:
                kind: Kind = "exchange" if is_backward and since_s is None else "collective"
                self.sent.append(
                    Span(kind, rank, came_s, max(came_s, arrived_s), noted["num_bytes"], noted["operation"])
                )
        self._wait_in_backward(buckets)
        self.waits.sort(key=lambda wait: wait.begin_s)

    def _wait(self, noted: Mapping[str, Any], key: str, came_s: float, begin_s: float, end_s: float) -> None:
        """Add a wait. Its key is dropped for an operation that may end before all ranks have joined."""
        is_of_all = noted["operation"] in _OF_ALL
        self.waits.append(_Wait(key if is_of_all else "", came_s, begin_s, end_s, noted["operation"]))

    def _wait_in_backward(self, begun: Sequence[tuple[Mapping[str, Any], float, float]]) -> None:
        """Add the waits for DDP's buckets, which happen in C++ at the end of the backward pass, where Python
        code cannot record them.

        Args:
            begun: the collectives that were called in a backward pass, as (record, call, arrival).
        """
        for index, part in enumerate(self.parts):
            collectives = [c for c in begun if part.begin_s <= c[1] < part.end_s]
            if part.kind != "backward" or not collectives:
                continue
            noted, came_s, _ = max(collectives, key=lambda c: c[1])
            end_s = min(part.end_s, max(arrived_s for _, _, arrived_s in collectives))
            has_arrived = all(c["arrived_s"] is not None for c, _, _ in collectives)
            self._wait(noted, noted["key"] if has_arrived else "", came_s, came_s, max(came_s, end_s))
            # After the exchange, the rest of the backward pass computes no gradients.
            self.parts[index : index + 1] = [
                Span(part.kind, self.rank, part.begin_s, end_s),
                Span("other", self.rank, end_s, part.end_s),
            ]

    def step(self, number: int, common: Sequence[str]) -> RankStep:
        """Return this rank's step: spans of work and of waits that not all ranks shared, and the shared
        waits.

        Args:
            number: the number of the cell.
            common: the keys of the collectives in which all ranks waited.
        """
        shared = set(common)
        work: list[Span] = []
        rest = list(self.parts)
        for wait in self.waits:
            while rest and rest[0].end_s <= wait.begin_s:
                work.append(rest.pop(0))
            if rest and rest[0].begin_s < wait.begin_s:
                work.append(Span(rest[0].kind, self.rank, rest[0].begin_s, wait.begin_s))
            if wait.key not in shared:
                work.append(Span("blocked", self.rank, wait.begin_s, wait.end_s, name=wait.name))
            while rest and rest[0].end_s <= wait.end_s:
                rest.pop(0)
            if rest and rest[0].begin_s < wait.end_s:
                rest[0] = Span(rest[0].kind, self.rank, wait.end_s, rest[0].end_s)
        work += rest
        # A cell that did nothing still has its last part, of length 0.
        work = [span for span in work if span.end_s > span.begin_s] or self.parts[-1:]
        blocked = tuple(Blocked(w.begin_s, w.end_s, w.came_s) for w in self.waits if w.key in shared)
        return RankStep(number, self.rank, tuple(work), tuple(self.sent), blocked)


def _common(ranks: Sequence[_Rank], error_s: float) -> list[str]:
    """Return the keys of the collectives in which all ranks waited in the same order, and whose result no
    rank had before the last rank had joined. Times are compared up to the error of the clocks."""
    waits = [{wait.key: wait for wait in rank.waits if wait.key} for rank in ranks]
    shared = set.intersection(*(set(by_key) for by_key in waits))
    orders = [[key for key in by_key if key in shared] for by_key in waits]
    if any(order != orders[0] for order in orders):
        return []
    return [
        key
        for key in orders[0]
        if max(by_key[key].came_s for by_key in waits) <= min(by_key[key].end_s for by_key in waits) + error_s
    ]
