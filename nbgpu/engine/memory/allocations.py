"""A log of memory allocations and frees, from which the peak and its composition follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PARAMETERS = "parameters"
GRADIENTS = "gradients"
BUCKETS = "buckets"
GATHERED = "gathered"
OPTIMIZER = "optimizer"
AVERAGE = "average"
DISCRIMINATOR = "discriminator"
BATCHES = "batches"
ACTIVATIONS = "activations"
SCRATCH = "scratch"
CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    BUCKETS,
    GATHERED,
    OPTIMIZER,
    AVERAGE,
    DISCRIMINATOR,
    BATCHES,
    ACTIVATIONS,
    SCRATCH,
)
"""The uses of a training step's memory. `buckets`: DDP's, if the gradients are not views of them; `gathered`:
the weights that FSDP has gathered, and the gradients that it is about to scatter; `batches`: the inputs, with
prefetched ones; `scratch`: memory that a kernel frees before it ends; `activations`: everything else."""


@dataclass(eq=False)
class Allocation:
    """One allocation, and when it was freed."""

    num_bytes: int
    begin: int
    """The number of changes in the log before the allocation."""
    end: int | None = None
    """The number of changes in the log before the memory was freed; None if it never was."""
    category: str = ACTIVATIONS
    is_labelled: bool = False

    def is_live_after(self, num_changes: int) -> bool:
        """Return whether the memory is allocated after this number of changes."""
        return self.begin < num_changes and (self.end is None or self.end >= num_changes)


class AllocationLog:
    """The allocations and frees of tensors' memory, in order."""

    def __init__(self) -> None:
        self._live: dict[int, Allocation] = {}
        self._allocations: list[Allocation] = []
        self._num_changes = 0
        self._now_bytes = 0
        self._scratch_bytes = 0
        self.peak_bytes = 0
        self.num_changes_at_peak = 0
        """The number of changes after which the peak was reached."""

    def holds(self, key: int) -> bool:
        """Return whether the allocation with this key has not been freed."""
        return key in self._live

    def allocate(self, key: int, num_bytes: int, category: str = ACTIVATIONS) -> Allocation:
        """Log an allocation; `key` identifies it until it is freed."""
        # The free of an earlier one may have been missed, such as one on another thread.
        self.free(key)
        allocation = Allocation(num_bytes, self._num_changes, category=category)
        self._live[key] = allocation
        self._allocations.append(allocation)
        self._num_changes += 1
        self._now_bytes += num_bytes
        self._update_peak(0)
        return allocation

    def free(self, key: int) -> None:
        """Log a free. Keys without an allocation are ignored."""
        allocation = self._live.pop(key, None)
        if allocation is not None:
            allocation.end = self._num_changes
            self._num_changes += 1
            self._now_bytes -= allocation.num_bytes

    def allocate_scratch(self, num_bytes: int) -> None:
        """Log the scratch memory of a kernel, which has been freed already."""
        self._update_peak(num_bytes)

    def label(self, category: str, keys: Iterable[int] | None) -> None:
        """Set the category of the live allocations among these keys, or with None of all. The first label of
        each counts."""
        for key in list(self._live) if keys is None else keys:
            allocation = self._live.get(key)
            if allocation is not None and not allocation.is_labelled:
                allocation.category, allocation.is_labelled = category, True

    def allocations_at_peak(self) -> list[Allocation]:
        """Return the allocations that were live at the peak."""
        return [
            allocation
            for allocation in self._allocations
            if allocation.is_live_after(self.num_changes_at_peak)
        ]

    def bytes_at_peak(self) -> dict[str, int]:
        """Return the bytes of each category at the peak; they add up to `peak_bytes`."""
        parts = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.allocations_at_peak():
            parts[allocation.category] += allocation.num_bytes
        parts[SCRATCH] += self._scratch_bytes
        return parts

    def _update_peak(self, scratch_bytes: int) -> None:
        """Record a new peak, with the scratch memory of the kernel that is running."""
        if self._now_bytes + scratch_bytes > self.peak_bytes:
            self.peak_bytes = self._now_bytes + scratch_bytes
            self.num_changes_at_peak = self._num_changes
            self._scratch_bytes = scratch_bytes
