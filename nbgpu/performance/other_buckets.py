"""The exposed time of a run's exchange of gradients with other buckets, over a known link.

The run has recorded when each of its buckets was ready. Other buckets hold the same gradients in the same
order, which are taken to become ready evenly between two measured moments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from nbgpu.performance.costs import Costs
from nbgpu.performance.schedule import Bucket, play

_MIB = 2**20
_FIRST_BUCKET_BYTES = _MIB
"""DDP's first bucket holds no more, so that the exchange begins early
(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""


@dataclass(frozen=True)
class ExchangeModel:
    """The exchange of one step over a known link.

    Attributes:
        buckets: those of the run, in the order in which they became ready.
        backward_s: from the beginning of the backward pass until the last of them was ready.
        costs: of the run's links.
        ranks: 2 or more.
    """

    buckets: Sequence[Bucket]
    backward_s: float
    costs: Costs
    ranks: int

    @property
    def num_bytes(self) -> float:
        """The bytes of all gradients, as they travel."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def exposed_s(self, buckets: Sequence[Bucket] | None = None) -> float:
        """Return the part of the exchange that the backward pass does not hide; with the run's own buckets by
        default."""
        timing = self.costs.timing("all_reduce", self.ranks)
        chosen = self.buckets if buckets is None else buckets
        return play(chosen, self.backward_s, timing, self.costs.at_once, self.costs.gain).exposed_s

    def latency_s(self) -> float:
        """The latencies of all buckets together."""
        timing = self.costs.timing("all_reduce", self.ranks)
        return sum(timing(bucket.num_bytes)[0] for bucket in self.buckets)

    def busy_s(self) -> float:
        """The time that all buckets need one after the other."""
        timing = self.costs.timing("all_reduce", self.ranks)
        return sum(sum(timing(bucket.num_bytes)) for bucket in self.buckets)

    def regrouped(self, bucket_mb: float) -> list[Bucket]:
        """Return the buckets that DDP would make with another size."""
        return regrouped(self.buckets, bucket_mb * _MIB)

    def halved(self) -> list[Bucket]:
        """Return the run's own buckets with half the bytes."""
        return [Bucket(bucket.ready_s, bucket.num_bytes / 2) for bucket in self.buckets]


def regrouped(buckets: Sequence[Bucket], limit_bytes: float) -> list[Bucket]:
    """Return the buckets that hold the same gradients, each closed as soon as it has `limit_bytes`.

    Args:
        buckets: at least one, in the order in which they were ready.
        limit_bytes: above 0.
    """
    reached: list[float] = []
    total = 0.0
    for bucket in buckets:
        total += bucket.num_bytes
        reached.append(total)
    made: list[Bucket] = []
    begin = 0.0
    while begin < total:
        end = min(total, begin + (limit_bytes if made else min(limit_bytes, _FIRST_BUCKET_BYTES)))
        # A last bucket of less than a byte comes from rounding.
        if total - end < 1:
            end = total
        made.append(Bucket(_ready_s(buckets, reached, end), end - begin))
        begin = end
    return made


def _ready_s(buckets: Sequence[Bucket], reached: Sequence[float], num_bytes: float) -> float:
    """Return the time at which the first `num_bytes` of the gradients are ready, interpolated between the
    buckets that were measured.

    Args:
        buckets: the measured buckets, in the order in which they were ready.
        reached: the bytes up to the end of each.
        num_bytes: above 0.
    """
    place = min(bisect_left(reached, num_bytes), len(reached) - 1)
    bucket = buckets[place]
    if place == 0:
        # Within the first bucket gradients count as evenly spread from the beginning of the backward pass.
        return bucket.ready_s * num_bytes / reached[0]
    before_s, before = buckets[place - 1].ready_s, reached[place - 1]
    return before_s + (bucket.ready_s - before_s) * (num_bytes - before) / bucket.num_bytes
