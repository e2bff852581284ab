"""What a training step takes: measured on the ranks at hand, and modelled for other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from nbgpu.errors import ConfigError
from nbgpu.scaling.links import Line, Links, bus_factor
from nbgpu.scaling.schedule import Bucket, Exchange, play
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

_DRIFT = 1.1
_STRAGGLES = 0.9
"""A rank that is the slowest in so many steps is slower, and not just unlucky."""
_GLOO_THREADS = 2
"""gloo's worker threads for each group (torch's ProcessGroupGloo), each of which carries one bucket."""
_MAX_RANKS = 1024


@dataclass(frozen=True)
class ModelledStep:
    """A step of a number of ranks, each with the batch that was measured."""

    ranks: int
    step_s: float
    between_s: tuple[float, float]
    """The step with the least latency and highest rate in the intervals of the links, and with the most
    latency and lowest rate."""
    exchange: Exchange | None
    """None for one rank, which exchanges nothing."""
    samples_per_s: float
    efficiency: float
    """The samples per second of each rank by those of one rank alone."""
    is_beyond: bool
    """Whether there are more ranks than were measured."""


class StepTimes:
    """The parts of a step of DDP, measured with and without the exchange of gradients. Prints as a table.

    The parts without the exchange are those of the rank that took longest in each step, because the others
    wait for it. All times are medians over the steps.

    Args:
        title: the recipe and what matters of its settings.
        backend: of torch.distributed.
        samples: the samples of one rank's step.
        measured: what each rank returned (`nbgpu.engine.scaling.step_timing`).
    """

    def __init__(
        self,
        title: str,
        backend: str,
        samples: int,
        measured: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]],
    ) -> None:
        self.title = title
        self.backend = backend
        self.world_size = len(measured)
        self._samples = samples
        alone = _slowest(measured, "alone")
        ranks = [rank for rank, _ in alone]
        self.slowest_rank = max(set(ranks), key=ranks.count)
        """The rank that most often computed longest, so that the others waited for it."""
        self.share_of_slowest = ranks.count(self.slowest_rank) / len(ranks)
        """The share of the steps in which it was the slowest."""
        steps = [step for _, step in alone]
        self.forward_s, self.backward_s, self.optimizer_s, self.computing_s = (
            _median(steps, part) for part in ("forward_s", "backward_s", "optimizer_s", "step_s")
        )
        self.step_s = _median([step for _, step in _slowest(measured, "together")], "step_s")
        """A step with the exchange."""
        again_s = _median([step for _, step in _slowest(measured, "alone again")], "step_s")
        self.drift = again_s / self.computing_s
        """A step without the exchange after the measurement by one before it."""
        self.buckets = [
            Bucket(median(step["buckets"][index][0] for step in steps), num_bytes)
            for index, (_, num_bytes) in enumerate(steps[0]["buckets"])
        ]

    @property
    def exposed_s(self) -> float:
        """The part of a step that the exchange adds to the computation, measured."""
        return self.step_s - self.computing_s

    @property
    def num_bytes(self) -> float:
        """The gradients that each step exchanges."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def predict(self, links: Links, ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> Modelled:
        """Model the step for other numbers of ranks over links as those that were measured.

        Every rank has the same batch as now, so that the global batch grows with the ranks (weak scaling).
        Buckets become ready as they were measured, and travel as the links were measured, by the formulas of
        a ring: its latency grows with the ranks, and each link carries 2(n-1)/n times the gradients. The
        model knows nothing of ranks that share cores, or of a slower rank among those that are added.

        Args:
            links: the result of `measure_links`, which need not have as many ranks.
            ranks: up to 1024 each.

        Raises:
            ConfigError: a number of ranks is not valid.
            KeyError: all_reduce was not measured.
        """
        if wrong := [n for n in ranks if not 1 <= n <= _MAX_RANKS]:
            raise ConfigError(f"ranks = {wrong} is not valid: 1 to {_MAX_RANKS}")
        line = links.of("all_reduce")
        at_once = 1
        gain = 1.0
        if self.backend.startswith("gloo") and "simulated link" not in self.backend:
            at_once, gain = _GLOO_THREADS, max(1.0, links.gain_of_two_at_once)
        return Modelled(self, line, len(line.ranks), [self._modelled(line, n, at_once, gain) for n in ranks])

    def _modelled(self, line: Line, ranks: int, at_once: int, gain: float) -> ModelledStep:
        def step(latency_s: float, bytes_per_s: float) -> tuple[float, Exchange | None]:
            if ranks == 1:
                return self.computing_s, None
            hops = (ranks - 1) / (len(line.ranks) - 1)
            share = bus_factor("all_reduce", ranks) / bus_factor("all_reduce", len(line.ranks))
            exchange = play(
                self.buckets, self.backward_s, latency_s * hops, bytes_per_s / share, at_once, gain
            )
            return self.computing_s + exchange.exposed_s, exchange

        step_s, exchange = step(line.latency_s, line.bytes_per_s)
        low_s, _ = step(line.latency_between_s[0], line.bytes_per_s_between[1])
        high_s, _ = step(line.latency_between_s[1], line.bytes_per_s_between[0])
        return ModelledStep(
            ranks,
            step_s,
            (min(low_s, step_s), max(high_s, step_s)),
            exchange,
            self._samples * ranks / step_s,
            self.computing_s / step_s,
            ranks > len(line.ranks),
        )

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__

    def _in_lines(self) -> Iterator[str]:
        yield f"{self.title}; {self.world_size} ranks over {self.backend}"
        parts = {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "optimizer, with clipping": self.optimizer_s,
            "exchange that is not hidden": self.exposed_s,
        }
        rows = [("", "ms", "of a step")]
        rows += [(name, f"{1e3 * s:.2f}", f"{s / self.step_s:.0%}") for name, s in parts.items()]
        rows.append(("a step", f"{1e3 * self.step_s:.2f}", ""))
        yield from aligned(rows, right=(1, 2))
        ready = ", ".join(f"{1e3 * bucket.ready_s:.1f}" for bucket in self.buckets)
        count = f"{len(self.buckets)} bucket" + ("s" if len(self.buckets) > 1 else "")
        yield (
            f"{in_words(self.num_bytes)} of gradients in {count}, ready {ready} ms after the backward pass has begun"
        )
        if self.share_of_slowest >= _STRAGGLES:
            yield f"the others waited for rank {self.slowest_rank} in {self.share_of_slowest:.0%} of the steps"
        if not 1 / _DRIFT <= self.drift <= _DRIFT:
            yield (
                f"other work disturbed the measurement: without the exchange a step took {self.drift:.2f} times as "
                "long afterwards. Measure again"
            )


class Modelled:
    """Modelled steps for some numbers of ranks. Prints as a table."""

    def __init__(
        self, times: StepTimes, line: Line, measured_ranks: int, steps: Sequence[ModelledStep]
    ) -> None:
        self._times = times
        self._line = line
        self._measured_ranks = measured_ranks
        self.steps = list(steps)

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
        heading = (
            "ranks",
            "a step, ms",
            "from",
            "to",
            "exchange, ms",
            "not hidden, ms",
            "samples/s",
            "efficiency",
            "",
        )
        rows = [heading]
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
        return "\n".join(
            [
                f"modelled, not measured: {self._times.title}; the same batch for each rank",
                *aligned(rows, right=range(8)),
                f"links: all_reduce of {self._measured_ranks} ranks, {1e6 * self._line.latency_s:.0f} us + bytes / "
                f"{self._line.bytes_per_s / 1e9:.2f} GB/s, and a ring beyond; from, to: with the ends of their 95 % "
                "intervals",
            ]
        )

    __repr__ = __str__

    def _remark(self, step: ModelledStep) -> str:
        if step.ranks == self._times.world_size:
            error = step.step_s / self._times.step_s - 1
            return f"measured: {1e3 * self._times.step_s:.2f} ms, the model is off by {error:+.0%}"
        return "beyond what was measured" if step.is_beyond else ""


def _slowest(
    measured: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]], kind: str
) -> list[tuple[int, Mapping[str, Any]]]:
    """For each step of a kind, the rank that took longest and its times. All ranks begin a step together."""
    return [
        max(enumerate(of_ranks), key=lambda found: float(found[1]["step_s"]))
        for of_ranks in zip(*(found[kind] for found in measured), strict=True)
    ]


def _median(steps: Sequence[Mapping[str, Any]], part: str) -> float:
    return median(float(step[part]) for step in steps)
