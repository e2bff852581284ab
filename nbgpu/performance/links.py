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

from nbgpu.performance.laws import Interval, interval
from nbgpu.text.html import shown_as_html
from nbgpu.text.ranks import count_of_ranks
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_NUM_RESAMPLES = 300
_SEED = 0
_LARGE_BYTES = 2**20
_DRIFT = 1.1
"""A second pass slower or faster by more than this factor is worth a remark."""
_ITEM_BYTES = 4
"""The bytes of a float32."""


@dataclass(frozen=True)
class Timed:
    """The times of one operation with tensors of one size."""

    operation: str
    ranks: tuple[int, ...]
    """The ranks that took part."""
    num_bytes: int
    """The size of the whole tensor; for all_gather and reduce_scatter, all ranks' parts together, and for two
    all_reduce at once, one of the two tensors."""
    least_s: float
    median_s: float
    between_s: Interval
    """The interval of the median, in seconds."""
    drift: float
    """The median of the second pass over the sizes, divided by that of the first."""
    num_samples: int
    num_wrong: int
    """Elements with a wrong value."""

    @property
    def algorithm_bytes_per_s(self) -> float:
        """The bytes of the tensor, or of both tensors, divided by the median time."""
        num_tensors = 2 if self.operation == "two all_reduce at once" else 1
        return num_tensors * self.num_bytes / self.median_s

    @property
    def bus_bytes_per_s(self) -> float:
        """The bytes per second that each link carries during the operation."""
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
    """The algorithm bandwidth of an infinitely large tensor."""
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
        """The backend's error message for each operation that it lacks."""
        for timings in zip(*measured, strict=True):
            self._add(timings)

    def _add(self, timings: Sequence[Mapping[str, Any]]) -> None:
        """Add the times and the fitted line of one operation.

        Args:
            timings: the operation as each rank timed it; `seconds` is by pass, round and size.
        """
        import numpy as np

        operation = str(timings[0]["operation"])
        ranks = tuple(timings[0]["ranks"]) or tuple(range(len(self.devices)))
        if reason := next((str(timing["why"]) for timing in timings if timing["why"]), ""):
            self.lacking[operation] = reason
            return
        # The operation is over when the last rank has its result. Shape of a pass: (rounds, sizes).
        passes = [np.max(by_rank, axis=0) for by_rank in zip(*(t["seconds"] for t in timings), strict=True)]
        if operation == "there and back":
            # A message there and back is timed on one clock; each way takes half of it.
            operation, passes = "send", [one_pass / 2 for one_pass in passes]
        sizes = [int(size) for size in timings[0]["sizes_bytes"]]
        rounds = np.concatenate(passes)
        medians = np.median(rounds, axis=0).tolist()
        resampled = _resampled_medians(rounds)
        before_s, after_s = (np.median(one_pass, axis=0) for one_pass in passes)
        for index, num_bytes in enumerate(sizes):
            self.timed.append(
                Timed(
                    operation=operation,
                    ranks=ranks,
                    num_bytes=num_bytes,
                    least_s=float(rounds[:, index].min()),
                    median_s=medians[index],
                    between_s=interval(resampled[:, index].tolist()),
                    drift=float(after_s[index] / before_s[index]),
                    num_samples=len(rounds),
                    num_wrong=sum(int(timing["num_wrong"][index]) for timing in timings),
                )
            )
        latency_s, bytes_per_s = fit(sizes, medians)
        latencies_s, rates = zip(*(fit(sizes, seconds) for seconds in resampled.tolist()), strict=True)
        errors = [
            abs((latency_s + size / bytes_per_s) / seconds - 1)
            for size, seconds in zip(sizes, medians, strict=True)
        ]
        self.lines[operation, ranks] = Line(
            operation, ranks, latency_s, bytes_per_s, interval(latencies_s), interval(rates), max(errors)
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
        """The factor by which the bytes of two large all_reduces travel faster at the same time than one
        after the other, from 0.5 (slower) over 1 (no gain) to 2 (as fast as one alone). Their latencies,
        which overlap anyway, are not counted; messages that are mostly latency show no gain.

        Raises:
            KeyError: 'all_reduce' or 'two all_reduce at once' was not measured with this backend.
        """
        alone = {t.num_bytes: t.median_s for t in self.timed if t.operation == "all_reduce"}
        at_once = {t.num_bytes: t.median_s for t in self.timed if t.operation == "two all_reduce at once"}
        sizes = sorted(alone.keys() & at_once.keys())
        if not sizes:
            raise KeyError("two all_reduce at once")
        # Over a slow link only small tensors are measured: take the largest of them.
        large = [size for size in sizes if size >= _LARGE_BYTES] or sizes[-1:]
        latency_s = self.of("all_reduce").latency_s
        gains = []
        for size in large:
            transfer_s, two_transfers_s = alone[size] - latency_s, at_once[size] - latency_s
            if transfer_s > alone[size] / 4:
                # Two cannot travel faster than one alone, but noise may measure that.
                gains.append(2 * transfer_s / max(two_transfers_s, transfer_s))
        return max(0.5, median(gains)) if gains else 1.0

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
                _describe_operation(t.operation, t.ranks, num_devices),
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
        # The backend may lack it, and on a busy host there may have been no time for one size in both ways.
        with suppress(KeyError):
            gain = self.gain_of_two_at_once
            yield f"two large all_reduce at once: x{gain:.2f} as fast as one after the other"
        for operation, reason in self.lacking.items():
            yield f"{operation}: {self.backend} lacks it ({reason})"


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
    import numpy as np

    # The weights 1 / seconds make the errors relative ones.
    seconds_per_byte, latency_s = np.polyfit(sizes_bytes, seconds, 1, w=1 / np.asarray(seconds))
    if seconds_per_byte > 0 and latency_s >= 0:
        return float(latency_s), float(1 / seconds_per_byte)
    # The best line has a negative latency or rate: take the best line through the origin.
    scaled = np.asarray(sizes_bytes) / np.asarray(seconds)
    return 0.0, float(scaled @ scaled / scaled.sum())


def _resampled_medians(
    rounds: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the medians of rounds drawn with replacement. A round is drawn as a whole, because other work on
    the machine slows neighbouring messages together.

    Args:
        rounds: seconds, (rounds, sizes).

    Returns:
        Seconds, (resamples, sizes).
    """
    import numpy as np

    draw = random.Random(_SEED)
    indices = [draw.choices(range(len(rounds)), k=len(rounds)) for _ in range(_NUM_RESAMPLES)]
    medians: np.ndarray[Any, np.dtype[np.float64]] = np.median(rounds[indices], axis=1)
    return medians


def _describe_operation(operation: str, ranks: Sequence[int], world_size: int) -> str:
    """Return the name of an operation in the table; messages between two of several ranks name the ranks."""
    if operation == "send":
        return f"send {ranks[0]} to {ranks[1]} and back, one way" if world_size > 2 else "send, one way"
    return operation


def _format_line(line: Line, world_size: int) -> str:
    """Return a fitted line as text: latency in us and rate in GB/s, with their intervals."""
    latencies = f"{1e6 * line.latency_between_s[0]:.0f} to {1e6 * line.latency_between_s[1]:.0f}"
    rates = f"{line.bytes_per_s_between[0] / 1e9:.2f} to {line.bytes_per_s_between[1] / 1e9:.2f}"
    return (
        f"{_describe_operation(line.operation, line.ranks, world_size)}: {1e6 * line.latency_s:.0f} us ({latencies}) + bytes / "
        f"{line.bytes_per_s / 1e9:.2f} GB/s ({rates}); off by at most {100 * line.worst_error:.0f} %"
    )
