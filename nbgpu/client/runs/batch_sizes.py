"""The result of a search for the largest batch that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbgpu.text.html import shown_as_html
from nbgpu.text.sizes import in_words
from nbgpu.text.tables import aligned

_MARGIN = 1 / 10
"""The share of the largest size that is left to a run's loggers and checkpoints, beside the steps."""


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes that were tried, in order. It prints as a table."""

    tried: Sequence[Mapping[str, Any]]
    """For each try `batch_size`, `fits`, `peak_bytes` by rank, and `why` it does not fit."""

    @property
    def largest(self) -> int:
        """The largest batch size that fitted on all ranks."""
        return max(int(t["batch_size"]) for t in self.tried if t["fits"])

    @property
    def batch_size(self) -> int:
        """The recommended batch size: the largest that fitted, less a tenth."""
        return max(1, int(self.largest * (1 - _MARGIN)))

    def __str__(self) -> str:
        rows = [("batch_size", "fits", "peak of each rank", "")]
        rows += [
            (
                str(t["batch_size"]),
                "yes" if t["fits"] else "no",
                ", ".join(in_words(num_bytes) for num_bytes in t["peak_bytes"]),
                t["why"],
            )
            for t in self.tried
        ]
        margin = f", which is {self.largest} less a margin" if self.batch_size < self.largest else ""
        return "\n".join([*aligned(rows), f"take batch_size={self.batch_size}{margin}"])

    __repr__ = __str__
    _repr_html_ = shown_as_html
