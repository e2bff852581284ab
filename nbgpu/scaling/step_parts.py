"""Where the time of a run's steps went, from the records of all ranks.

An exchange ends on all ranks together, after the last rank has computed its gradients. What a rank spends in
it beyond its own computation is therefore of two kinds: it waits for the last rank, and then for the transfer
itself. The ranks' moments tell them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nbgpu.protocol.records import CLOCKS, EXCHANGE_PARTS, STEP_PARTS, Event, Sample
from nbgpu.scaling.clocks import Clocks
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

OTHER = "other_s"
WAITING = "waiting_s"
TRANSFER = "transfer_s"
_COLUMNS = (*STEP_PARTS, OTHER, *EXCHANGE_PARTS, WAITING, TRANSFER)
_WORDS = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    WAITING: "exchange: waiting for the last rank",
    TRANSFER: "exchange: transfer that is not hidden",
    "exposed_s": "exchange that is not hidden",
    "optimizer_s": "optimizer, with clipping",
    OTHER: "other",
}


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank, in seconds."""

    step: int
    rank: int
    step_s: float
    parts_s: Mapping[str, float]
    """By column those that were measured: `STEP_PARTS`, which add up to `step_s` with `other_s`, and beside
    them `exchange_s` and its part `hidden_s`. `exposed_s` consists of `waiting_s`, until the last rank had
    its gradients, and `transfer_s`; the two are there if all ranks recorded the step."""
    waited_for: int | None
    """The rank that had its last gradient last, the rank itself if it was the one; None if that is not
    known."""


class StepParts:
    """The time of a run's steps, split. Prints as a table of the medians.

    Args:
        records: of all ranks, in order for each rank. A step that was repeated counts as it was done last.
        world_size: the number of ranks.
    """

    def __init__(self, records: Iterable[Sample | Event], world_size: int) -> None:
        by_step: dict[int, dict[int, Mapping[str, float]]] = {}
        compared = []
        for record in records:
            if isinstance(record, Event):
                compared += [record] if record.kind == CLOCKS else []
            elif "forward_s" in record.values:
                by_step.setdefault(record.step, {})[record.rank] = record.values
        self.world_size = world_size
        self.clocks = Clocks.of(compared, world_size)
        self.rows: list[RankStep] = [
            row for step, by_rank in sorted(by_step.items()) for row in self._of_step(step, by_rank)
        ]
        self._num_last = Counter(row.rank for row in self.rows if row.rank == row.waited_for)

    def _of_step(self, step: int, by_rank: Mapping[int, Mapping[str, float]]) -> Iterator[RankStep]:
        ready_s = {
            rank: self.clocks.of_rank_0(rank, values["ready_at_s"])
            for rank, values in by_rank.items()
            if "ready_at_s" in values
        }
        last = max(ready_s, key=ready_s.__getitem__) if len(ready_s) == self.world_size > 1 else None
        for rank, values in sorted(by_rank.items()):
            parts_s = {name: values[name] for name in (*STEP_PARTS, *EXCHANGE_PARTS) if name in values}
            # The parts of a GPU's step are the device's, and the step is the host's: a single one may differ.
            parts_s[OTHER] = max(0.0, values["step_s"] - sum(parts_s.get(name, 0.0) for name in STEP_PARTS))
            if last is not None and "exposed_s" in parts_s:
                parts_s[WAITING] = min(ready_s[last] - ready_s[rank], parts_s["exposed_s"])
                parts_s[TRANSFER] = parts_s["exposed_s"] - parts_s[WAITING]
            yield RankStep(step, rank, values["step_s"], parts_s, last)

    @property
    def num_compared(self) -> int:
        """The steps that all ranks recorded, so that the last one is known."""
        return sum(self._num_last.values())

    @property
    def slowest_rank(self) -> int | None:
        """The rank that was most often the last to have its gradients; None if that is not known of any
        step."""
        return self._num_last.most_common(1)[0][0] if self._num_last else None

    @property
    def share_of_slowest(self) -> float:
        """The share of the steps in which it was the last; 0 if there is none."""
        return max(self._num_last.values(), default=0) / max(1, self.num_compared)

    def medians_s(self, rank: int | None = None) -> dict[str, float]:
        """The median of `step_s` and of each part that was measured, over the steps of a rank or of all."""
        rows = [row for row in self.rows if rank is None or row.rank == rank]
        if not rows:
            return {}
        found = {"step_s": median(row.step_s for row in rows)}
        for name in _COLUMNS:
            values = [row.parts_s[name] for row in rows if name in row.parts_s]
            if values:
                found[name] = median(values)
        return found

    def frame(self) -> pd.DataFrame:
        """One row for each step and rank."""
        import pandas as pd

        names = [name for name in _COLUMNS if any(name in row.parts_s for row in self.rows)]
        rows = [
            [row.step, row.rank, row.step_s, *(row.parts_s.get(name) for name in names), row.waited_for]
            for row in self.rows
        ]
        table = pd.DataFrame(rows, columns=["step", "rank", "step_s", *names, "waited_for"])
        # A column that lacks some steps would become floats.
        table["waited_for"] = table["waited_for"].astype("Int64")
        return table

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__

    def _in_lines(self) -> Iterator[str]:
        if not self.rows:
            yield "no step was recorded with its parts"
            return
        medians = [self.medians_s(rank) for rank in range(self.world_size)]
        names = [name for name in _WORDS if any(name in of_rank for of_rank in medians)]
        if TRANSFER in names:
            names.remove("exposed_s")
        rows = [("ms, medians", *(f"rank {rank}" for rank in range(self.world_size)))]
        rows += [(_WORDS[name], *(_ms(of_rank.get(name)) for of_rank in medians)) for name in names]
        rows.append(("a step", *(_ms(of_rank.get("step_s")) for of_rank in medians)))
        rows += [
            (words, *(_ms(of_rank.get(name)) for of_rank in medians))
            for name, words in (("exchange_s", "the whole exchange"), ("hidden_s", "hidden part of it"))
            if any(name in of_rank for of_rank in medians)
        ]
        yield from aligned(rows, right=range(1, self.world_size + 1))
        if self.slowest_rank is not None:
            yield (
                f"rank {self.slowest_rank} was the last one in {self.share_of_slowest:.0%} of "
                f"{self.num_compared} steps"
            )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"
