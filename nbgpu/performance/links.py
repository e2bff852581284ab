"""The speed at which the ranks of a cluster exchange tensors: times by size, and a straight line through
them.

The columns are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). The algorithm
bandwidth is the tensor's bytes divided by the time of the operation. The bus bandwidth is the rate of each
link meanwhile, and can be compared with the link's own rate for any number of ranks: 2(n-1)/n times the
algorithm bandwidth for an all_reduce, (n-1)/n times for an all_gather and a reduce_scatter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from nbgpu.performance.laws import interval
from nbgpu.text.html import shown_as_html
from nbgpu.text.ranks import count_of_ranks
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

_NUM_RESAMPLES = 300
_SEED = 0
_LARGE_BYTES = 2**20
_DRIFT = 1.1
_ITEM_BYTES = 4

Interval = tuple[float, float]
"""95 % of the medians of resampled rounds lie between the two."""


@dataclass(frozen=True)
class Timed:
    """One operation with tensors of one size."""

    operation: str
    ranks: tuple[int, ...]
    """The ranks that took part."""
    num_bytes: int
    """The size of the whole tensor; for all_gather and reduce_scatter, all ranks' parts together, and for two
    all_reduce at once, one of the two tensors."""
    least_s: float
    median_s: float
    between_s: Interval
    """The interval of the median."""
    drift: float
    """The median of the second pass over the sizes by that of the first."""
    num_samples: int
    num_wrong: int
    """Elements with a wrong value."""

    @property
    def algorithm_bytes_per_s(self) -> float:
        """The bytes of the tensor, or of both tensors, by the median time."""
        # num_bytes is the size of one of the two tensors, and the link carries both.
        num_tensors = 2 if self.operation == "two all_reduce at once" else 1
        return num_tensors * self.num_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """The rate that each link carries meanwhile."""
        return self.algorithm_bytes_per_s * bus_factor(self.operation, len(self.ranks))


@dataclass(frozen=True)
class Line:
    """The time of an operation as latency + bytes / rate, fitted by least squares of the relative errors.

    Absolute errors would fit the largest tensors alone.
    """

    operation: str
    ranks: tuple[int, ...]
    latency_s: float
    bytes_per_s: float
    """The algorithm bandwidth of an endless tensor."""
    latency_between_s: Interval
    bytes_per_s_between: Interval
    worst_error: float
    """The largest relative difference between the line and a measured median."""

    def seconds(self, num_bytes: float) -> float:
        """The time for a tensor of this size."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Links:
    """The speed at which a cluster's ranks exchange tensors. Prints as a table.

    Args:
        backend: of torch.distributed, such as 'nccl' or 'gloo'.
        devices: the devices' names, by rank.
        measured: the times that each rank measured (`nbgpu.engine.scaling.link_timing`).
    """

    def __init__(
        self, backend: str, devices: Sequence[str], measured: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """Combine the ranks' measurements, operation by operation."""
        self.backend = backend
        self.devices = tuple(devices)
        self.timed: list[Timed] = []
        self.lines: dict[tuple[str, tuple[int, ...]], Line] = {}
        """By operation and ranks."""
        self.lacking: dict[str, str] = {}
        """Operations that the backend lacks, and what it said."""
        for of_ranks in zip(*measured, strict=True):
            self._take(of_ranks)

    def _take(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Add the times and the fitted line of one operation, from the measurement of each rank.

        Args:
            of_ranks: the same operation as each rank measured it: `seconds` by pass, round and size.
        """
        first = of_ranks[0]
        operation = str(first["operation"])
        ranks = tuple(first["ranks"]) or tuple(range(len(self.devices)))
        if reason := next((str(timing["why"]) for timing in of_ranks if timing["why"]), ""):
            self.lacking[operation] = reason
            return
        # A message there and back is timed on one clock; each way takes half of it.
        messages = 2 if operation == "there and back" else 1
        sizes = [int(size) for size in first["sizes_bytes"]]
        passes = [
            [
                # The operation is over when the last rank has its result.
                [max(seconds) / messages for seconds in zip(*of_round, strict=True)]
                for of_round in zip(*of_pass, strict=True)
            ]
            for of_pass in zip(*(timing["seconds"] for timing in of_ranks), strict=True)
        ]
        rounds = [one_round for one_pass in passes for one_round in one_pass]
        resampled = list(_resampled(rounds))
        medians = [median(column) for column in zip(*rounds, strict=True)]
        by_size = list(zip(*resampled, strict=True))
        for index, (num_bytes, seconds) in enumerate(zip(sizes, zip(*rounds, strict=True), strict=True)):
            before, after = (median(one_round[index] for one_round in one_pass) for one_pass in passes)
            self.timed.append(
                Timed(
                    operation="send" if messages == 2 else operation,
                    ranks=ranks,
                    num_bytes=num_bytes,
                    least_s=min(seconds),
                    median_s=medians[index],
                    between_s=interval(by_size[index]),
                    drift=after / before,
                    num_samples=len(seconds),
                    num_wrong=sum(int(timing["num_wrong"][index]) for timing in of_ranks),
                )
            )
        line = self._line("send" if messages == 2 else operation, ranks, sizes, medians, resampled)
        self.lines[line.operation, ranks] = line

    @staticmethod
    def _line(
        operation: str,
        ranks: tuple[int, ...],
        sizes: Sequence[int],
        medians: Sequence[float],
        resampled: Sequence[Sequence[float]],
    ) -> Line:
        """Fit latency and rate to the median times, with intervals from the resampled rounds.

        Args:
            operation: the operation.
            ranks: the ranks that took part.
            sizes: the sizes in bytes.
            medians: the median time of each size.
            resampled: the medians of each resampling, by size.
        """
        latency_s, bytes_per_s = fit(sizes, medians)
        fits = [fit(sizes, seconds) for seconds in resampled]
        errors = [
            abs((latency_s + size / bytes_per_s) / seconds - 1)
            for size, seconds in zip(sizes, medians, strict=True)
        ]
        return Line(
            operation,
            ranks,
            latency_s,
            bytes_per_s,
            interval([latency for latency, _ in fits]),
            interval([rate for _, rate in fits]),
            max(errors),
        )

    def of(self, operation: str, ranks: Sequence[int] = ()) -> Line:
        """Return the fitted line of an operation.

        Args:
            operation: 'all_reduce', 'two all_reduce at once', 'all_gather', 'reduce_scatter' or 'send'.
            ranks: the two ranks of 'send'; empty for all ranks.

        Raises:
            KeyError: the operation was not measured.
        """
        return self.lines[operation, tuple(ranks) or tuple(range(len(self.devices)))]

    @property
    def gain_of_two_at_once(self) -> float:
        """The factor by which the bytes of two large all_reduces travel faster at once than one by one; 1 for
        no gain.

        Their latencies pass at the same time anyway, and are not counted.

        Raises:
            KeyError: the backend lacks one of them.
        """
        alone = {t.num_bytes: t.median_s for t in self.timed if t.operation == "all_reduce"}
        at_once = {t.num_bytes: t.median_s for t in self.timed if t.operation == "two all_reduce at once"}
        sizes = sorted(alone.keys() & at_once.keys())
        if not sizes:
            raise KeyError("two all_reduce at once")
        # Over a slow link only small tensors are measured: take the largest.
        large = [size for size in sizes if size >= _LARGE_BYTES] or sizes[-1:]
        latency_s = self.of("all_reduce").latency_s
        # Latencies overlap anyway, so they are taken off. Two at once cannot take less than half of the time
        # of one.
        gains = [
            2 * max(0.0, alone[size] - latency_s) / max(at_once[size] - latency_s, alone[size] / 2)
            for size in large
        ]
        return min(2.0, max(0.5, median(gains)))

    def frame(self) -> pd.DataFrame:
        """One row for each operation, pair and size, with the columns of nccl-tests in seconds and bytes."""
        import pandas as pd

        return pd.DataFrame(
            {
                "operation": t.operation,
                "ranks": ",".join(map(str, t.ranks)),
                "bytes": t.num_bytes,
                "count": t.num_bytes // _ITEM_BYTES,
                "least_s": t.least_s,
                "median_s": t.median_s,
                "from_s": t.between_s[0],
                "to_s": t.between_s[1],
                "algbw_bytes_per_s": t.algorithm_bytes_per_s,
                "busbw_bytes_per_s": t.bus_bytes_per_s,
                "wrong": t.num_wrong,
                "drift": t.drift,
                "samples": t.num_samples,
            }
            for t in self.timed
        )

    def __str__(self) -> str:
        return "\n".join(self._in_lines())

    __repr__ = __str__
    _repr_html_ = shown_as_html

    def _in_lines(self) -> Iterator[str]:
        """Yield the lines of the printed table, the fitted lines, and the operations that the backend
        lacks."""
        num_devices = len(self.devices)
        yield f"{count_of_ranks(num_devices)} over {self.backend}: {', '.join(dict.fromkeys(self.devices))}"
        heading = ("", "size", "count", "least, us", "median, us", "from", "to", "algbw, GB/s", "busbw, GB/s")
        rows = [(*heading, "wrong", "drift")]
        rows += [
            (
                _named(t.operation, t.ranks, num_devices),
                in_words(t.num_bytes),
                str(t.num_bytes // _ITEM_BYTES),
                f"{1e6 * t.least_s:.1f}",
                f"{1e6 * t.median_s:.1f}",
                f"{1e6 * t.between_s[0]:.1f}",
                f"{1e6 * t.between_s[1]:.1f}",
                f"{t.algorithm_bytes_per_s / 1e9:.3f}",
                f"{t.bus_bytes_per_s / 1e9:.3f}",
                str(t.num_wrong),
                f"x{t.drift:.2f}" if not 1 / _DRIFT <= t.drift <= _DRIFT else "",
            )
            for t in self.timed
        ]
        yield from aligned(rows, right=range(1, len(rows[0])))
        yield (
            "float32; all_reduce in place, the others out of place; from, to: 95 % interval of the median; drift: "
            "the second pass by the first, where they differ by more than 10 %"
        )
        for line in self.lines.values():
            if line.operation != "two all_reduce at once":
                yield _format_line(line, num_devices)
        if "two all_reduce at once" in {line.operation for line in self.lines.values()}:
            # On a busy host there may have been no time to measure one size in both ways.
            with suppress(KeyError):
                gain = self.gain_of_two_at_once
                yield f"two large all_reduce at once: x{gain:.2f} as fast as one after the other"
        for operation, why in self.lacking.items():
            yield f"{operation}: {self.backend} lacks it ({why})"


def bus_factor(operation: str, world_size: int) -> float:
    """Return the bus bandwidth of an operation divided by its algorithm bandwidth."""
    match operation:
        case "all_reduce" | "two all_reduce at once":
            return 2 * (world_size - 1) / world_size
        case "all_gather" | "reduce_scatter":
            return (world_size - 1) / world_size
        case _:
            # send: the tensor crosses one link once.
            return 1.0


def fit(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / rate by least squares of the relative errors.

    Args:
        sizes_bytes: two different sizes at least.
        seconds: the time for each.

    Returns:
        The latency in seconds, 0 at least, and the rate in bytes per second.
    """
    weights = [1 / s**2 for s in seconds]
    total = sum(weights)
    mean_bytes = sum(w * b for w, b in zip(weights, sizes_bytes, strict=True)) / total
    mean_s = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    covariance = sum(
        w * (b - mean_bytes) * (s - mean_s) for w, b, s in zip(weights, sizes_bytes, seconds, strict=True)
    )
    variance = sum(w * (b - mean_bytes) ** 2 for w, b in zip(weights, sizes_bytes, strict=True))
    latency_s = mean_s - covariance / variance * mean_bytes
    if covariance > 0 and latency_s >= 0:
        return latency_s, variance / covariance
    # The best line has a negative latency or rate: take the best line through the origin.
    by_bytes = sum(w * b * s for w, b, s in zip(weights, sizes_bytes, seconds, strict=True))
    return 0.0, sum(w * b**2 for w, b in zip(weights, sizes_bytes, strict=True)) / by_bytes


def _resampled(rounds: Sequence[Sequence[float]]) -> Iterator[list[float]]:
    """Yield the medians by size of rounds drawn with replacement. A round is drawn as a whole, because other
    work on the machine slows neighbouring messages together."""
    draw = random.Random(_SEED)
    for _ in range(_NUM_RESAMPLES):
        chosen = draw.choices(rounds, k=len(rounds))
        yield [median(column) for column in zip(*chosen, strict=True)]


def _named(operation: str, ranks: Sequence[int], world_size: int) -> str:
    if operation == "send":
        return f"send {ranks[0]} to {ranks[1]} and back, one way" if world_size > 2 else "send, one way"
    return operation


def _format_line(line: Line, world_size: int) -> str:
    latencies = f"{1e6 * line.latency_between_s[0]:.0f} to {1e6 * line.latency_between_s[1]:.0f}"
    rates = f"{line.bytes_per_s_between[0] / 1e9:.2f} to {line.bytes_per_s_between[1] / 1e9:.2f}"
    return (
        f"{_named(line.operation, line.ranks, world_size)}: {1e6 * line.latency_s:.0f} us ({latencies}) + bytes / "
        f"{line.bytes_per_s / 1e9:.2f} GB/s ({rates}); off by at most {100 * line.worst_error:.0f} %"
    )
