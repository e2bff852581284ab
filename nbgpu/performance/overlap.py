"""One step of DDP, moment by moment, as the model plays it through for a link, a number of ranks and
buckets of some size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbgpu.errors import ConfigError
from nbgpu.machine.links import Link
from nbgpu.performance.bottlenecks import in_ms
from nbgpu.performance.costs import RingCosts
from nbgpu.performance.other_buckets import regrouped
from nbgpu.performance.schedule import Bucket, Exchange, play
from nbgpu.performance.steps import StepTimes

_MIB = 2**20


@dataclass(frozen=True)
class Overlap:
    """A modelled step. All times are seconds from its beginning."""

    ranks: int
    link: Link
    backward_at_s: float
    """When the backward pass begins in which gradients are exchanged."""
    computed_at_s: float
    """When the rank has its last gradient."""
    arrived_at_s: float
    """When all ranks have the averages of all buckets, and the optimizer begins."""
    step_s: float
    buckets: Sequence[Bucket]
    """`ready_s` counts from the beginning of the step."""
    sent_s: Sequence[tuple[float, float]]
    """For each bucket when it began to travel and when it had arrived."""
    exchange: Exchange

    @property
    def title(self) -> str:
        """What the step takes, and how much of it is an exchange that nothing hides."""
        busy_s, exposed_s = self.exchange.busy_s, self.exchange.exposed_s
        count = f"{len(self.buckets)} bucket{'s' if len(self.buckets) > 1 else ''}"
        return (
            f"modelled: a step of {self.ranks} ranks over {self.link.name} takes {in_ms(self.step_s)}; the exchange of {count} takes "
            f"{in_ms(busy_s)}, of which {in_ms(self.exchange.hidden_s)} are hidden and {in_ms(exposed_s)} are not"
        )


def overlap(times: StepTimes, link: Link, ranks: int, bucket_mb: float | None = None) -> Overlap:
    """Play a step of DDP through.

    Args:
        times: a step that was measured with DDP.
        link: from each rank to the next, which form a ring. One bucket travels at a time.
        ranks: 2 or more.
        bucket_mb: the size of the buckets; None for those that were measured.

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
