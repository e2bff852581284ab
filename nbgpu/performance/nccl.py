"""NCCL's times by torch's own model of it, as a table that a rank has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbgpu.errors import ConfigError
from nbgpu.performance.costs import End, interpolated
from nbgpu.performance.schedule import Timing
from nbgpu.text.html import shown_as_html

GPUS = ("V100", "A100", "H100", "B200")
SIZES_BYTES = tuple(1024 * 2**power for power in range(21))
"""1 KiB to 1 GiB."""
MAX_RANKS = 1024
_OFF = {"least": 0.9, "expected": 1.0, "most": 1.1}
"""Its authors found it within 10 % at 64 to 256 GPUs (https://github.com/pytorch/pytorch/pull/180463)."""


def ranks_of(ranks_per_node: int) -> list[int]:
    """The numbers of ranks in the table: those of one node, and full nodes."""
    on_one_node = range(2, ranks_per_node + 1)
    return [*on_one_node, *range(2 * ranks_per_node, MAX_RANKS + 1, ranks_per_node)]


class NcclTimes:
    """Collectives of NCCL on a kind of GPU, modelled. Prints what it is.

    Args:
        gpu: one of GPUS.
        ranks_per_node: GPUs on each node.
        has_nvlink: whether they are joined by NVLink, else by PCIe.
        table: seconds by operation and ranks for SIZES_BYTES (`nbgpu.engine.scaling.link_timing`).
    """

    measured_ranks = 0
    at_once = 1
    gain = 1.0

    def __init__(
        self,
        gpu: str,
        ranks_per_node: int,
        has_nvlink: bool,
        table: Mapping[str, Mapping[int, Sequence[float]]],
    ) -> None:
        self.gpu = gpu
        self.ranks_per_node = ranks_per_node
        self.has_nvlink = has_nvlink
        self._table = table

    def timing(self, operation: str, ranks: int, end: End = "expected") -> Timing:
        """Return the times of 'all_reduce', 'all_gather' or 'reduce_scatter'.

        Raises:
            ConfigError: the ranks do not fill the nodes.
        """
        if ranks not in self._table[operation]:
            raise ConfigError(f"{ranks} ranks do not fill nodes of {self.ranks_per_node}")
        seconds = self._table[operation][ranks]
        factor = _OFF[end]
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
