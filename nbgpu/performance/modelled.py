"""Modelled steps for numbers of ranks, as a table and in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbgpu.errors import ConfigError
from nbgpu.performance import sharded
from nbgpu.performance.costs import Costs, End
from nbgpu.performance.figure import Picture, Points, picture
from nbgpu.performance.laws import Estimate, Law
from nbgpu.performance.schedule import Bucket, Exchange, play
from nbgpu.performance.sharded import ShardedBlock
from nbgpu.text.html import shown_as_html
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

MAX_RANKS = 1024
_HALVINGS = 20
_LARGEST_FACTOR = 1024.0


@dataclass(frozen=True)
class ModelledStep:
    """A step of a number of ranks, each with the batch that was measured."""

    ranks: int
    step_s: float
    between_s: tuple[float, float]
    """The step with the favourable ends of what is known of the links, and with the unfavourable ones."""
    exchange: Exchange | None
    """None for one rank, which exchanges nothing."""
    samples_per_s: float
    efficiency: float
    """The samples per second of each rank by those of one rank alone."""
    is_beyond: bool
    """Whether there are more ranks than were measured, or other links."""


@dataclass(frozen=True)
class StepModel:
    """What a model of a step knows: what the ranks compute, what they exchange, and what that costs."""

    title: str
    samples: int
    """The samples of one rank's step."""
    computing_s: float
    """A step without the exchange."""
    forward_s: float
    backward_s: float
    optimizer_s: float
    last_backward_s: float
    """The backward pass of the last micro-batch, in which gradients are exchanged."""
    micro_batches: int
    buckets: tuple[Bucket, ...]
    blocks: tuple[ShardedBlock, ...]
    rest_bytes: float
    """The weights outside of all blocks."""
    costs: Costs
    is_sharded: bool
    """FSDP in place of DDP."""
    overlaps: bool
    """Whether FSDP's collectives go on while the ranks compute."""

    def step(self, ranks: int, end: End = "expected") -> tuple[float, Exchange | None]:
        """Return the time of a step and its exchange.

        Raises:
            ConfigError: so many ranks do not fill the nodes.
        """
        if ranks == 1:
            return self.computing_s, None
        if not self.is_sharded:
            costs = self.costs
            timing = costs.timing("all_reduce", ranks, end)
            exchange = play(self.buckets, self.last_backward_s, timing, costs.at_once, costs.gain)
            return self.computing_s + exchange.exposed_s, exchange
        exchange = sharded.play(
            self.blocks,
            self.rest_bytes,
            self.forward_s / self.micro_batches,
            self.backward_s / self.micro_batches,
            self.costs.timing("all_gather", ranks, end),
            self.costs.timing("reduce_scatter", ranks, end),
            self.overlaps,
        )
        # Each rank updates its own shard only.
        saved_s = self.optimizer_s * (1 - 1 / ranks)
        return self.computing_s - saved_s + self.micro_batches * exchange.exposed_s, exchange

    def modelled(self, ranks: int) -> ModelledStep:
        """Return the step with its interval."""
        step_s, exchange = self.step(ranks)
        least_s, most_s = self.step(ranks, "least")[0], self.step(ranks, "most")[0]
        return ModelledStep(
            ranks,
            step_s,
            (min(least_s, step_s), max(most_s, step_s)),
            exchange,
            self.samples * ranks / step_s,
            self.computing_s / step_s,
            ranks > max(1, self.costs.measured_ranks),
        )

    def share_added(self, ranks: int) -> float:
        """Return the part of the computation's time that the exchange adds to a step."""
        return self.step(ranks)[0] / self.computing_s - 1

    def with_batch(self, factor: float) -> StepModel:
        """Return the same for a larger batch, whose forward and backward passes take longer in proportion."""
        return replace(
            self,
            computing_s=self.computing_s + (factor - 1) * (self.forward_s + self.backward_s),
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
            last_backward_s=factor * self.last_backward_s,
            buckets=tuple(Bucket(factor * bucket.ready_s, bucket.num_bytes) for bucket in self.buckets),
            blocks=tuple(ShardedBlock(block.num_bytes, factor * block.forward_s) for block in self.blocks),
        )

    def with_gradients(self, factor: float) -> StepModel:
        """Return the same for fewer bytes of gradients and weights, as with compression."""
        return replace(
            self,
            buckets=tuple(Bucket(bucket.ready_s, factor * bucket.num_bytes) for bucket in self.buckets),
            blocks=tuple(ShardedBlock(factor * block.num_bytes, block.forward_s) for block in self.blocks),
            rest_bytes=factor * self.rest_bytes,
        )


@dataclass(frozen=True)
class Hidden:
    """Up to where the computation hides the exchange. Prints as a sentence."""

    share: float
    """What the exchange may add to a step and still count as hidden."""
    ranks: int
    """Up to how many ranks it is hidden; 1 if it is never."""
    largest_ranks: int
    """The largest number of ranks that was asked for."""
    batch_factor: float | None
    """With a batch so many times as large it is hidden for `largest_ranks`; None if with none up to 1024."""
    gradients_factor: float | None
    """With so many times the bytes of gradients it is hidden for `largest_ranks`; None if latency is too
    long."""

    def __str__(self) -> str:
        most = f"{self.share:.0%}"
        if self.ranks >= MAX_RANKS:
            return f"the computation hides the exchange: it adds at most {most} to a step, up to {MAX_RANKS} ranks"
        if self.ranks == 1:
            text = f"the exchange is not hidden: with the fewest ranks it adds more than {most} to a step"
        else:
            text = f"the computation hides the exchange up to {self.ranks} ranks: it adds at most {most} to a step"
        if self.largest_ranks <= self.ranks:
            return text
        of_batch = None if self.batch_factor is None else f"{self.batch_factor:.3g} times the batch"
        of_bytes = (
            None
            if self.gradients_factor is None
            else f"{self.gradients_factor:.2g} times the bytes of gradients"
        )
        there = f"At {self.largest_ranks} ranks"
        if ways := [way for way in (of_batch, of_bytes) if way]:
            text += f". {there} it is hidden with {', or with '.join(ways)}"
        else:
            text += f". {there} no larger batch hides it"
        if of_bytes is None:
            text += ". Fewer bytes do not, because the latency of the messages alone takes longer"
        return text


class Modelled:
    """Modelled steps for some numbers of ranks. Prints as a table.

    Args:
        model: what is known.
        ranks: the numbers of ranks.
        measured_ranks: for how many ranks a step was measured; 0 for none.
        measured_s: that step.
    """

    def __init__(
        self, model: StepModel, ranks: Sequence[int], measured_ranks: int, measured_s: float
    ) -> None:
        self._model = model
        self._measured_ranks = measured_ranks
        self._measured_s = measured_s
        self.steps = [model.modelled(n) for n in ranks]

    def hidden_up_to(self, share: float = 0.05) -> Hidden:
        """Return up to how many ranks the computation hides the exchange, and what would hide it for more.

        Args:
            share: of the computation's time, what the exchange may add to a step and still count as hidden.

        Raises:
            ConfigError: the share is not above 0.
        """
        if not share > 0:
            raise ConfigError(f"share = {share} is not valid: above 0, such as 0.05")
        valid = [n for n in range(2, MAX_RANKS + 1) if self._fills_nodes(n)]
        count = _first(lambda index: self._model.share_added(valid[index]) > share, len(valid))
        largest = max(step.ranks for step in self.steps)
        hidden_ranks = valid[count - 1] if count else 1
        if largest <= hidden_ranks:
            return Hidden(share, hidden_ranks, largest, 1.0, 1.0)
        batch = _least(lambda f: self._model.with_batch(f).share_added(largest) <= share, _LARGEST_FACTOR)
        # Fewer bytes are the inverse of a growing factor.
        bytes_ = _least(
            lambda f: self._model.with_gradients(1 / f).share_added(largest) <= share, _LARGEST_FACTOR
        )
        return Hidden(share, hidden_ranks, largest, batch, None if bytes_ is None else 1 / bytes_)

    def _fills_nodes(self, ranks: int) -> bool:
        try:
            self._model.costs.timing("all_gather" if self._model.is_sharded else "all_reduce", ranks)
        except ConfigError:
            return False
        return True

    def figure(
        self,
        measured: Mapping[int, Estimate] | None = None,
        laws: Sequence[Law] = (),
    ) -> Picture:
        """Draw the speed-up in samples per second, with its interval.

        What lies beyond the measured ranks has another line style.

        Args:
            measured: speed-ups by number of ranks (`nbgpu.performance.laws.speedups`); None for the one that
                was measured with this step.
            laws: fitted laws to be drawn beside it.
        """
        if measured is None and not self._measured_ranks:
            measured = {}
        elif measured is None:
            speedup = self._measured_ranks * self._model.computing_s / self._measured_s
            measured = {self._measured_ranks: Estimate(speedup, (speedup, speedup))}
        one_s = self._model.computing_s
        steps = sorted(self.steps, key=lambda step: step.ranks)
        points = [
            Points(
                step.ranks,
                step.ranks * one_s / step.step_s,
                (step.ranks * one_s / step.between_s[1], step.ranks * one_s / step.between_s[0]),
                step.is_beyond,
            )
            for step in steps
        ]
        return picture(f"modelled: {self._model.title}", points, measured, laws)

    def frame(self) -> pd.DataFrame:
        """One row for each number of ranks."""
        import pandas as pd

        return pd.DataFrame(
            {
                "ranks": step.ranks,
                "step_s": step.step_s,
                "from_s": step.between_s[0],
                "to_s": step.between_s[1],
                "exchange_s": step.exchange.busy_s if step.exchange else 0.0,
                "exposed_s": step.exchange.exposed_s if step.exchange else 0.0,
                "samples_per_s": step.samples_per_s,
                "efficiency": step.efficiency,
                "beyond_measured": step.is_beyond,
            }
            for step in self.steps
        )

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__
    _repr_html_ = shown_as_html

    def _in_lines(self) -> Iterator[str]:
        strategy = "FSDP" if self._model.is_sharded else "DDP"
        yield f"modelled, not measured: {self._model.title}; {strategy}, the same batch for each rank"
        heading = ("ranks", "a step, ms", "from", "to", "exchange, ms", "not hidden, ms", "samples/s")
        rows = [(*heading, "efficiency", "")]
        rows += [
            (
                str(step.ranks),
                f"{1e3 * step.step_s:.2f}",
                f"{1e3 * step.between_s[0]:.2f}",
                f"{1e3 * step.between_s[1]:.2f}",
                f"{1e3 * step.exchange.busy_s:.2f}" if step.exchange else "",
                f"{1e3 * step.exchange.exposed_s:.2f}" if step.exchange else "",
                f"{step.samples_per_s:.1f}",
                f"{step.efficiency:.0%}",
                self._remark(step),
            )
            for step in self.steps
        ]
        yield from aligned(rows, right=range(8))
        yield str(self._model.costs)
        yield "from, to: the ends of what is known of the links, with a tree in place of a ring for the first"
        if any(step.ranks > 1 for step in self.steps):
            yield str(self.hidden_up_to())

    def _remark(self, step: ModelledStep) -> str:
        if step.ranks == self._measured_ranks and not step.is_beyond:
            error = step.step_s / self._measured_s - 1
            return f"measured: {1e3 * self._measured_s:.2f} ms, the model is off by {error:+.0%}"
        if not step.is_beyond:
            return ""
        return "beyond what was measured" if self._model.costs.measured_ranks else "over links not measured"


def _first(is_so: Callable[[int], bool], count: int) -> int:
    """The first index for which something that stays so is so; `count` if for none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle + 1, high)
    return low


def _least(is_so: Callable[[float], bool], largest: float) -> float | None:
    """The least factor from 1 for which something that stays so is so; None if for none up to the largest."""
    if not is_so(largest):
        return None
    low, high = 1.0, largest
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_so(middle) else (middle, high)
    return high
