"""The exposed time of a run's exchange of gradients with other buckets, over a known link.

The run has recorded when each of its buckets was ready. Other buckets hold the same gradients in the same
order. Between two recorded times the gradients are assumed to become ready at a constant rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nbgpu.performance.costs import Costs
from nbgpu.performance.schedule import Bucket, Timing, play

_MIB = 2**20
_FIRST_BUCKET_BYTES = _MIB
"""The limit of DDP's first bucket, which is small so that the exchange begins early
(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""


@dataclass(frozen=True)
class ExchangeModel:
    """The exchange of one step over a known link.

    Attributes:
        buckets: the run's buckets, in the order in which they became ready.
        backward_s: the time from the beginning of the backward pass until the last bucket was ready.
        costs: the costs of collectives over the run's links.
        ranks: 2 or more.
    """

    buckets: Sequence[Bucket]
    backward_s: float
    costs: Costs
    ranks: int

    @property
    def _timing(self) -> Timing:
        return self.costs.timing("all_reduce", self.ranks)

    @property
    def num_bytes(self) -> float:
        """The bytes of all gradients, in the format in which they are sent."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def exposed_s(self, buckets: Sequence[Bucket] | None = None) -> float:
        """Return the part of the exchange that the backward pass does not hide, for the given buckets or, by
        default, for the run's buckets."""
        chosen = self.buckets if buckets is None else buckets
        return play(chosen, self.backward_s, self._timing, self.costs.at_once, self.costs.gain).exposed_s

    def latency_s(self) -> float:
        """Return the sum of the latencies of all buckets."""
        return sum(self._timing(bucket.num_bytes)[0] for bucket in self.buckets)

    def busy_s(self) -> float:
        """Return the time that all buckets need one after the other."""
        return sum(sum(self._timing(bucket.num_bytes)) for bucket in self.buckets)

    def regrouped(self, bucket_mb: float) -> list[Bucket]:
        """Return the buckets that DDP would form with another `bucket_mb`."""
        return regrouped(self.buckets, bucket_mb * _MIB)

    def halved(self) -> list[Bucket]:
        """Return the run's buckets with half the bytes, as with 16-bit gradients."""
        return [Bucket(bucket.ready_s, bucket.num_bytes / 2) for bucket in self.buckets]


def regrouped(buckets: Sequence[Bucket], limit_bytes: float) -> list[Bucket]:
    """Return buckets of `limit_bytes` each that hold the same gradients; the first and the last bucket may be
    smaller.

    Args:
        buckets: at least one, in the order in which they became ready.
        limit_bytes: above 0.
    """
    reached = list(accumulate(bucket.num_bytes for bucket in buckets))
    total = reached[-1]
    made: list[Bucket] = []
    begin = 0.0
    while begin < total:
        end = min(total, begin + (limit_bytes if made else min(limit_bytes, _FIRST_BUCKET_BYTES)))
        # A rest of less than a byte is a rounding error, and no bucket.
        if total - end < 1:
            end = total
        made.append(Bucket(_ready_s(buckets, reached, end), end - begin))
        begin = end
    return made


def _ready_s(buckets: Sequence[Bucket], reached: Sequence[float], num_bytes: float) -> float:
    """Return the time at which the first `num_bytes` of the gradients are ready, interpolated linearly
    between the ends of the measured buckets; the first bucket begins with the backward pass.

    Args:
        buckets: the measured buckets, in the order in which they became ready.
        reached: the bytes up to the end of each bucket.
        num_bytes: above 0.
    """
    index = min(bisect_left(reached, num_bytes), len(reached) - 1)
    bucket = buckets[index]
    before_s, before = (buckets[index - 1].ready_s, reached[index - 1]) if index else (0.0, 0.0)
    return before_s + (bucket.ready_s - before_s) * (num_bytes - before) / bucket.num_bytes
