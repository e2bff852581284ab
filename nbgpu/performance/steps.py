"""The time of a training step: measured on the ranks at hand, and modelled for other ranks and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nbgpu.errors import ConfigError
from nbgpu.machine.links import Link, parse_link
from nbgpu.performance.bottlenecks import in_ms
from nbgpu.performance.costs import MAX_RANKS, Costs, MeasuredCosts, NcclTimes, NodesCosts, RingCosts
from nbgpu.performance.links import Links
from nbgpu.performance.modelled import Modelled, StepModel
from nbgpu.performance.other_buckets import regrouped
from nbgpu.performance.schedule import Bucket, Exchange, ShardedBlock, play
from nbgpu.text.html import shown_as_html
from nbgpu.text.ranks import count_of_ranks
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

_DRIFT = 1.1
"""A second measurement slower or faster by more than this factor was disturbed."""
_STRAGGLES = 0.9
"""A rank that is the slowest in this share of the steps is slower, and not just unlucky."""
_CONCURRENT_COLLECTIVES = {"gloo": 2}
"""The number of collectives that run at the same time, for backends that run more than one."""
_STRATEGIES = ("ddp", "fsdp")
_MIB = 2**20


class StepTimes:
    """The parts of a step, measured with and without the exchange of gradients. Prints as a table.

    In each step the parts without the exchange are those of the slowest rank, because the others wait for it.
    All times are medians over the steps, in seconds.

    Args:
        title: the recipe and its most important settings.
        backend: the backend of torch.distributed, with the simulated link if there is one.
        samples: the samples of one rank's step.
        measured: what each rank returned (`nbgpu.engine.scaling.step_timing`).
        strategy: the strategy with which the exchange was measured, 'ddp' or 'fsdp'.
    """

    def __init__(
        self,
        title: str,
        backend: str,
        samples: int,
        measured: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]],
        strategy: str = "ddp",
    ) -> None:
        """Take the medians over the measured steps, in each step of the slowest rank."""
        self.title = title
        self.strategy = strategy
        self.backend = backend
        self.world_size = len(measured)
        self._samples = samples
        alone = _slowest(measured, "alone")
        ranks = [rank for rank, _ in alone]
        self.slowest_rank = max(set(ranks), key=ranks.count)
        """The rank that computed longest in most steps, so that the others waited for it."""
        self.share_of_slowest = ranks.count(self.slowest_rank) / len(ranks)
        """The share of the steps in which `slowest_rank` was the slowest."""
        steps = [step for _, step in alone]
        self.forward_s, self.backward_s, self.optimizer_s, self.computing_s = (
            _median(steps, part) for part in ("forward_s", "backward_s", "optimizer_s", "step_s")
        )
        self.last_backward_s = _median(steps, "last_backward_s")
        """The backward pass of the last micro-batch, in which DDP exchanges gradients."""
        self.step_s = _median([step for _, step in _slowest(measured, "together")], "step_s")
        """The time of a step with the exchange."""
        again_s = _median([step for _, step in _slowest(measured, "alone again")], "step_s")
        self.drift = again_s / self.computing_s
        """The time of a step without the exchange at the end of the measurement, divided by that at its
        beginning."""
        self.buckets = [
            Bucket(median(step["buckets"][index][0] for step in steps), num_bytes)
            for index, (_, num_bytes) in enumerate(steps[0]["buckets"])
        ]
        self.micro_batches = int(steps[0]["micro_batches"])
        self.blocks = _blocks(steps, self.forward_s / self.micro_batches)
        """The parts of the model that FSDP gathers one at a time, with their time in one forward pass."""
        self.rest_bytes = float(steps[0]["rest_bytes"])
        """The bytes of the weights outside of all blocks."""

    @property
    def exposed_s(self) -> float:
        """The measured time that the exchange adds to the computation of a step."""
        return self.step_s - self.computing_s

    @property
    def num_bytes(self) -> float:
        """The bytes of gradients that a step exchanges."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def predict(
        self,
        links: Links | None = None,
        ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        *,
        link: Link | NcclTimes | str | None = None,
        ranks_per_node: int | None = None,
        between: Link | str | None = None,
        strategy: str | None = None,
    ) -> Modelled:
        """Model the step for other numbers of ranks, other links, several nodes, or FSDP.

        Every rank keeps its batch size, so that the global batch grows with the number of ranks (weak
        scaling). Buckets become ready at the measured times. The model does not include ranks that share
        cores, or added ranks that are slower.

        Args:
            links: the result of `measure_links`, for any number of ranks.
            ranks: the numbers of ranks to model, at most 1024 each.
            link: instead of `links`, the link from each rank to the next: a name such as '10GbE', a rate and
                a one-way latency such as '1Gbit/s,0.2ms', or NCCL's times (`nbgpu.nccl_times`).
            ranks_per_node: for several nodes. Not for NCCL's times, which already contain it.
            between: the link from each node to the next, which the ranks of a node share. Goes with
                `ranks_per_node`.
            strategy: 'ddp' or 'fsdp'; None for the one that was measured.

        Raises:
            ConfigError: an argument is not valid; the message names all invalid ones.
            KeyError: the collectives of the strategy were not measured.
        """
        strategy = self.strategy if strategy is None else strategy
        wrong = []
        if bad := [n for n in ranks if not 1 <= n <= MAX_RANKS]:
            wrong.append(f"ranks = {bad} is not valid: 1 to {MAX_RANKS}")
        if not ranks:
            wrong.append("ranks is empty")
        if (links is None) == (link is None):
            wrong.append("give either links=, from measure_links(), or link=, such as '10GbE'")
        if strategy not in _STRATEGIES:
            wrong.append(
                f"strategy={strategy!r} is not modelled, only {' and '.join(map(repr, _STRATEGIES))}"
            )
        if (ranks_per_node is None) != (between is None):
            wrong.append("ranks_per_node= and between= go together")
        if ranks_per_node is not None and isinstance(link, NcclTimes):
            wrong.append("NCCL's times have their nodes already: leave ranks_per_node= and between= out")
        if ranks_per_node is not None and ranks_per_node < 1:
            wrong.append(f"ranks_per_node = {ranks_per_node} is not valid: at least 1")
        elif ranks_per_node and (uneven := [n for n in ranks if n > ranks_per_node and n % ranks_per_node]):
            wrong.append(f"ranks = {uneven} do not fill nodes of {ranks_per_node}")
        if wrong:
            raise ConfigError("\n".join(wrong))
        model = StepModel(
            title=self.title,
            samples=self._samples,
            computing_s=self.computing_s,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            optimizer_s=self.optimizer_s,
            last_backward_s=self.last_backward_s,
            micro_batches=self.micro_batches,
            buckets=tuple(self.buckets),
            blocks=tuple(self.blocks),
            rest_bytes=self.rest_bytes,
            costs=self._costs(links, link, ranks_per_node, between),
            is_sharded=strategy == "fsdp",
            # CPU ranks have no streams, so that FSDP waits for each of its collectives.
            overlaps=not self.backend.startswith("gloo") or isinstance(link, NcclTimes),
        )
        # The measured step can only be compared with a model of the same strategy.
        measured_ranks = self.world_size if strategy == self.strategy else 0
        return Modelled(model, ranks, measured_ranks, self.step_s)

    def _costs(
        self,
        links: Links | None,
        link: Link | NcclTimes | str | None,
        ranks_per_node: int | None,
        between: Link | str | None,
    ) -> Costs:
        """Return the costs of collectives over the measured links, over a described link or by NCCL's model,
        on one node or on several."""
        within_node: Costs
        if isinstance(link, NcclTimes):
            within_node = link
        elif link is not None:
            within_node = RingCosts(_link(link), _CONCURRENT_COLLECTIVES.get(self.backend, 1))
        else:
            assert links is not None, "`predict` has checked that either links or link is given"
            within_node = MeasuredCosts(links)
        if ranks_per_node is None or between is None:
            return within_node
        return NodesCosts(within_node, ranks_per_node, _link(between))

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__
    _repr_html_ = shown_as_html

    def _in_lines(self) -> Iterator[str]:
        """Yield the lines of the printed table, and sentences on the buckets or blocks, on a slow rank and on
        a disturbed measurement."""
        yield f"{self.title}; {count_of_ranks(self.world_size)} over {self.backend}"
        parts = {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "optimizer, with clipping": self.optimizer_s,
            # One rank exchanges nothing: the added time is overhead of DDP or FSDP.
            "exchange that is not hidden"
            if self.world_size > 1
            else f"{self.strategy.upper()}'s own work": self.exposed_s,
        }
        rows = [("", "ms", "of a step")]
        rows += [(name, f"{1e3 * s:.2f}", f"{s / self.step_s:.0%}") for name, s in parts.items()]
        rows.append(("a step", f"{1e3 * self.step_s:.2f}", ""))
        yield from aligned(rows, right=(1, 2))
        if self.strategy == "fsdp":
            blocks = f"{len(self.blocks)} block" + ("s" if len(self.blocks) != 1 else "")
            rest = f" and {in_words(self.rest_bytes)} outside of them" if self.rest_bytes else ""
            yield f"{in_words(self.num_bytes - self.rest_bytes)} of weights in {blocks}{rest}"
        else:
            ready = ", ".join(f"{1e3 * bucket.ready_s:.1f}" for bucket in self.buckets)
            count = f"{len(self.buckets)} bucket" + ("s" if len(self.buckets) > 1 else "")
            yield (
                f"{in_words(self.num_bytes)} of gradients in {count}, ready {ready} ms after the backward pass has "
                "begun"
            )
        if self.share_of_slowest >= _STRAGGLES:
            yield f"the others waited for rank {self.slowest_rank} in {self.share_of_slowest:.0%} of the steps"
        if not 1 / _DRIFT <= self.drift <= _DRIFT:
            yield (
                f"other work disturbed the measurement: without the exchange a step took {self.drift:.2f} times as "
                "long afterwards. Measure again"
            )


def _slowest(
    measured: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]], kind: str
) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (slowest rank, its times) for each step of a kind. All ranks begin a step together.

    Args:
        measured: by rank, the times of its steps by kind.
        kind: 'alone', 'together' or 'alone again'.
    """
    return [
        max(enumerate(by_rank), key=lambda times: float(times[1]["step_s"]))
        for by_rank in zip(*(times[kind] for times in measured), strict=True)
    ]


def _median(steps: Sequence[Mapping[str, Any]], part: str) -> float:
    return median(float(step[part]) for step in steps)


def _blocks(steps: Sequence[Mapping[str, Any]], forward_s: float) -> list[ShardedBlock]:
    """Return the blocks of FSDP with the medians of their forward times; if the blocks could not be timed,
    the forward pass is divided among them in proportion to their bytes."""
    blocks = [
        ShardedBlock(num_bytes, median(step["blocks"][index][1] for step in steps))
        for index, (num_bytes, _) in enumerate(steps[0]["blocks"])
    ]
    if any(block.forward_s for block in blocks):
        # The medians of the blocks may add up to slightly more than the median of the forward pass.
        scale = min(1.0, forward_s / sum(block.forward_s for block in blocks))
        return [ShardedBlock(block.num_bytes, scale * block.forward_s) for block in blocks]
    total = sum(block.num_bytes for block in blocks)
    return [ShardedBlock(block.num_bytes, forward_s * block.num_bytes / total) for block in blocks]


def _link(link: Link | str) -> Link:
    return parse_link(link) if isinstance(link, str) else link


@dataclass(frozen=True)
class Overlap:
    """A modelled step. All times are seconds from its beginning."""

    ranks: int
    link: Link
    backward_at_s: float
    """When the backward pass in which gradients are exchanged begins."""
    computed_at_s: float
    """When the rank has its last gradient."""
    arrived_at_s: float
    """When all ranks have the averages of all buckets, and the optimizer begins."""
    step_s: float
    buckets: Sequence[Bucket]
    """`ready_s` counts from the beginning of the step."""
    sent_s: Sequence[tuple[float, float]]
    """For each bucket the beginning and the end of its all_reduce."""
    exchange: Exchange

    @property
    def title(self) -> str:
        """A sentence with the time of the step, and the hidden and exposed times of the exchange."""
        busy_s, exposed_s = self.exchange.busy_s, self.exchange.exposed_s
        count = f"{len(self.buckets)} bucket{'s' if len(self.buckets) > 1 else ''}"
        return (
            f"modelled: a step of {self.ranks} ranks over {self.link.name} takes {in_ms(self.step_s)}; the exchange of {count} takes "
            f"{in_ms(busy_s)}, of which {in_ms(self.exchange.hidden_s)} are hidden and {in_ms(exposed_s)} are not"
        )


def overlap(times: StepTimes, link: Link, ranks: int, bucket_mb: float | None = None) -> Overlap:
    """Simulate a step of DDP over a link, with the measured buckets or with buckets of another size.

    Args:
        times: a step that was measured with DDP.
        link: the link from each rank to the next in a ring, on which one bucket travels at a time.
        ranks: 2 or more.
        bucket_mb: the size of the buckets in MiB; None for the buckets that were measured.

    Raises:
        ConfigError: the step was measured with FSDP, which has no buckets.
    """
    if times.strategy != "ddp":
        raise ConfigError(
            f"the step was measured with strategy={times.strategy!r}, and only DDP has buckets whose exchange overlaps with "
            "the backward pass. Measure it with strategy='ddp'"
        )
    buckets = times.buckets if bucket_mb is None else regrouped(times.buckets, bucket_mb * _MIB)
    timing = RingCosts(link).timing("all_reduce", ranks)
    exchange = play(buckets, times.last_backward_s, timing)
    backward_at_s = max(0.0, times.computing_s - times.optimizer_s - times.last_backward_s)
    computed_at_s = backward_at_s + times.last_backward_s
    arrived_at_s = backward_at_s + exchange.ended_s
    return Overlap(
        ranks=ranks,
        link=link,
        backward_at_s=backward_at_s,
        computed_at_s=computed_at_s,
        arrived_at_s=arrived_at_s,
        step_s=arrived_at_s + times.optimizer_s,
        buckets=[Bucket(backward_at_s + bucket.ready_s, bucket.num_bytes) for bucket in buckets],
        sent_s=[(backward_at_s + begin, backward_at_s + end) for begin, end in exchange.sent],
        exchange=exchange,
    )
