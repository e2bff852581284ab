"""The cost of collectives: as measured, over links of a given latency and rate, over several nodes, and by
torch's own model of NCCL.

Extrapolation follows the formulas of the ring algorithm, which gloo and NCCL use for large tensors: an
all_reduce of n ranks takes 2(n-1) steps, in which each rank sends 2(n-1)/n times the tensor; an all_gather
and a reduce_scatter take n-1 steps, in which each rank sends (n-1)/n times the tensor (Patarasuk and Yuan
2009, doi:10.1016/j.jpdc.2008.09.002). The 'least' end of an interval counts the steps of a tree instead,
log2(n).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nbgpu.errors import ConfigError
from nbgpu.machine.links import Link
from nbgpu.performance.laws import Interval
from nbgpu.performance.links import Links, bus_factor
from nbgpu.performance.schedule import Timing, fixed_timing
from nbgpu.text.html import shown_as_html
from nbgpu.text.ranks import count_of_ranks

End = Literal["least", "expected", "most"]
"""Which end of the interval of a cost, or its middle."""

GPUS = ("V100", "A100", "H100", "B200")
SIZES_BYTES = tuple(1024 * 2**power for power in range(21))
"""1 KiB to 1 GiB."""
MAX_RANKS = 1024
_NCCL_MODEL_FACTORS = {"least": 0.9, "expected": 1.0, "most": 1.1}
"""torch's model of NCCL was within 10 % at 64 to 256 GPUs (https://github.com/pytorch/pytorch/pull/180463)."""


class Costs(ABC):
    """The time of a collective for any number of ranks and bytes."""

    measured_ranks = 0
    """The largest number of ranks for which times were measured; 0 for none."""
    at_once = 1
    """The number of collectives that run at the same time."""
    gain = 1.0
    """The total rate of several concurrent collectives, divided by the rate of one."""

    @abstractmethod
    def timing(self, operation: str, ranks: int, end: End = "expected") -> Timing:
        """Return the function that computes the time of a collective from the tensor's bytes.

        Args:
            operation: 'all_reduce', 'all_gather' or 'reduce_scatter'.
            ranks: 2 or more.
            end: the favourable end of the interval ('least'), its middle, or the unfavourable end.

        Raises:
            KeyError: the operation was not measured.
            ConfigError: the ranks do not fill the nodes.
        """


class MeasuredCosts(Costs):
    """Collectives as measured on this cluster, interpolated linearly between the measured sizes.

    Args:
        links: the measurement.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.measured_ranks = len(links.devices)
        # ProcessGroupGloo has two worker threads for each group, each of which runs one collective. A
        # simulated link has one queue.
        is_simulated = "simulated link" in links.backend
        self.at_once = 2 if links.backend.startswith("gloo") and not is_simulated else 1
        self.gain = links.gain_of_two_at_once if self.at_once > 1 else 1.0

    def timing(self, operation: str, ranks: int, end: End = "expected") -> Timing:
        """Return the measured times for the measured number of ranks. For any other number the latency is
        scaled by the steps of a ring or tree, and the rest by the bytes that each link carries."""
        line = self._links.of(operation)
        latency_s = _at_end(line.latency_s, line.latency_between_s, end)
        measured = len(line.ranks)
        if ranks > measured:
            latency_factor = _steps(ranks, end) / _steps(measured, end)
        else:
            latency_factor = (ranks - 1) / (measured - 1)
        bytes_factor = bus_factor(operation, ranks) / bus_factor(operation, measured)
        times = [timed for timed in self._links.timed if timed.operation == operation]
        sizes = [timed.num_bytes for timed in times]
        seconds = [_at_end(timed.median_s, timed.between_s, end) for timed in times]

        def cost(num_bytes: float) -> tuple[float, float]:
            transfer_s = max(0.0, interpolated(sizes, seconds, num_bytes) - latency_s)
            return latency_s * latency_factor, transfer_s * bytes_factor

        return cost

    def __str__(self) -> str:
        line = self._links.of("all_reduce")
        return (
            f"links: all_reduce of {len(line.ranks)} ranks as measured, about {1e6 * line.latency_s:.0f} us + bytes / "
            f"{line.bytes_per_s / 1e9:.2f} GB/s, and a ring beyond"
        )


class RingCosts(Costs):
    """Collectives over links of a given latency and rate.

    Args:
        link: the link from each rank to the next.
        at_once: the number of collectives that run at the same time.
    """

    def __init__(self, link: Link, at_once: int = 1) -> None:
        self.link = link
        self.at_once = at_once

    def timing(self, operation: str, ranks: int, end: End = "expected") -> Timing:
        """Return the times of a ring. An all_reduce goes round the ring twice, an all_gather or
        reduce_scatter once."""
        rounds = 2 if operation == "all_reduce" else 1
        latency_s = rounds * _steps(ranks, end) * self.link.latency_s
        return fixed_timing(latency_s, self.link.bytes_per_s / bus_factor(operation, ranks))

    def __str__(self) -> str:
        return f"links: a ring over {self.link}, {self.link.source}"


class NodesCosts(Costs):
    """Collectives of ranks on several nodes. The ranks of a node share its one link to the next node.

    An all_reduce is a reduce_scatter on each node, an all_reduce of every part between the nodes, and an
    all_gather on each node.

    Args:
        inside: the costs of collectives within one node.
        ranks_per_node: 1 or more.
        between: the link from each node to the next.
    """

    def __init__(self, inside: Costs, ranks_per_node: int, between: Link) -> None:
        self._inside = inside
        self._ranks_per_node = ranks_per_node
        self._between = RingCosts(between)
        self.measured_ranks = min(inside.measured_ranks, ranks_per_node)
        self.at_once = inside.at_once
        self.gain = inside.gain

    def timing(self, operation: str, ranks: int, end: End = "expected") -> Timing:
        """Return the times of a hierarchical collective: within the nodes, and between them over one link per
        node.

        Raises:
            ConfigError: the ranks do not fill the nodes.
        """
        nodes, rest = divmod(ranks, self._ranks_per_node)
        if ranks <= self._ranks_per_node:
            return self._inside.timing(operation, ranks, end)
        if rest:
            raise ConfigError(f"{ranks} ranks do not fill nodes of {self._ranks_per_node}")
        parts = [self._between.timing(operation, nodes, end)]
        if self._ranks_per_node > 1:
            on_node = ("reduce_scatter", "all_gather") if operation == "all_reduce" else (operation,)
            parts += [self._inside.timing(name, self._ranks_per_node, end) for name in on_node]

        def cost(num_bytes: float) -> tuple[float, float]:
            costs = [part(num_bytes) for part in parts]
            return sum(latency_s for latency_s, _ in costs), sum(transfer_s for _, transfer_s in costs)

        return cost

    def __str__(self) -> str:
        return (
            f"{self._inside}; {count_of_ranks(self._ranks_per_node)} on a node, and "
            f"between the nodes a ring over {self._between.link}, {self._between.link.source}"
        )


def interpolated(sizes: Sequence[float], seconds: Sequence[float], num_bytes: float) -> float:
    """Return the time for a size by linear interpolation between measured sizes, and by extrapolation of the
    outermost two beyond them.

    Args:
        sizes: at least two measured sizes, ascending.
        seconds: the time of each.
        num_bytes: the size to return the time for.
    """
    upper = min(max(bisect_left(sizes, num_bytes), 1), len(sizes) - 1)
    (size_0, size_1), (time_0, time_1) = sizes[upper - 1 : upper + 1], seconds[upper - 1 : upper + 1]
    # Because of noise a larger tensor may have taken less time, which must not be extrapolated.
    slope = max(0.0, (time_1 - time_0) / (size_1 - size_0))
    return time_1 + slope * (num_bytes - size_1)


def _steps(ranks: int, end: End) -> float:
    """Return the number of successive steps of a collective: log2(ranks) in a tree, ranks - 1 in a ring."""
    return math.log2(ranks) if end == "least" else ranks - 1


def _at_end(expected: float, between: Interval, end: End) -> float:
    """Return one end of an interval, or the expected value."""
    return {"least": between[0], "expected": expected, "most": between[1]}[end]


def ranks_of(ranks_per_node: int) -> list[int]:
    """Return the numbers of ranks in the table of `NcclTimes`: 2 up to one node, and then full nodes."""
    on_one_node = range(2, ranks_per_node + 1)
    return [*on_one_node, *range(2 * ranks_per_node, MAX_RANKS + 1, ranks_per_node)]


class NcclTimes(Costs):
    """Modelled collectives of NCCL on a kind of GPU. Prints a line about the model.

    Args:
        gpu: one of GPUS.
        ranks_per_node: the number of GPUs on each node.
        has_nvlink: whether the GPUs of a node are connected by NVLink, else by PCIe.
        table: by operation and number of ranks, the seconds for each of SIZES_BYTES
            (`nbgpu.engine.scaling.link_timing`).
    """

    def __init__(
        self,
        gpu: str,
        ranks_per_node: int,
        has_nvlink: bool,
        table: Mapping[str, Mapping[int, Sequence[float]]],
    ) -> None:
        """Keep the table of modelled times."""
        self.gpu = gpu
        self.ranks_per_node = ranks_per_node
        self.has_nvlink = has_nvlink
        self._table = table

    def timing(self, operation: str, ranks: int, end: End = "expected") -> Timing:
        """Return the function that computes a collective's time from its bytes, interpolated between the
        table's sizes; the ends of the interval are as far below and above as the model may be off.

        Raises:
            ConfigError: the ranks do not fill the nodes.
        """
        if ranks not in self._table[operation]:
            raise ConfigError(f"{ranks} ranks do not fill nodes of {self.ranks_per_node}")
        seconds = self._table[operation][ranks]
        factor = _NCCL_MODEL_FACTORS[end]
        # The table does not tell latency from transfer. All of it is given as latency, which makes no
        # difference where one collective runs at a time.
        return lambda num_bytes: (factor * interpolated(SIZES_BYTES, seconds, num_bytes), 0.0)

    def frame(self) -> Any:
        """One row for each operation, number of ranks and size, in seconds and bytes, as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(
            {"operation": operation, "ranks": ranks, "bytes": num_bytes, "modelled_s": s}
            for operation, by_ranks in self._table.items()
            for ranks, seconds in by_ranks.items()
            for num_bytes, s in zip(SIZES_BYTES, seconds, strict=True)
        )

    def __str__(self) -> str:
        joined = "NVLink" if self.has_nvlink else "PCIe"
        return (
            f"links: NCCL on {self.gpu}s with {joined}, {self.ranks_per_node} on a node and InfiniBand between the "
            "nodes, by torch's model of NCCL (torch._inductor.comm_analysis), within 10 % by its authors"
        )

    __repr__ = __str__
    _repr_html_ = shown_as_html
