"""Measures the memory of the tensors in a block of code, with torch's profiler.

The profiler records every allocation and free of a device's allocator, also the scratch memory of kernels. It
does not see memory from elsewhere, such as the kernels that oneDNN compiles and the buffers of gloo and NCCL,
nor memory that the allocator keeps cached.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from nbgpu.engine.memory.allocations import ACTIVATIONS, GATHERED, SCRATCH, Allocation, AllocationLog

_log = logging.getLogger("nbgpu.memory")

_MARK = "nbgpu memory "
_GATHERING = ("FSDP::all_gather", "FSDP::post_backward_reduce")
"""Prefixes of the names of the profiler's ranges in which FSDP allocates memory for its communication."""
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
"""torch's number of each device type (c10/core/DeviceType.h)."""


@dataclass
class MemoryTrace:
    """Memory allocated by a block of code. The log is filled when the block has ended."""

    log: AllocationLog = field(default_factory=AllocationLog)
    marks: list[tuple[str, tuple[int, ...] | None]] = field(default_factory=list)
    """For each call of `note` (category, addresses of the tensors' storages or None), in order."""

    def note(self, category: str, tensors: Iterable[Tensor] | None) -> None:
        """Set the category of these tensors, or with None of all other live tensors."""
        keys = None if tensors is None else tuple(t.untyped_storage().data_ptr() for t in tensors)
        # A named range puts the moment of this call into the profiler's events.
        with record_function(f"{_MARK}{len(self.marks)}"):
            self.marks.append((category, keys))


@contextmanager
def trace_memory(device: torch.device) -> Iterator[MemoryTrace]:
    """Trace the memory that tensors take on a device, inside the context.

    Raises:
        RuntimeError: a profiler runs already.
    """
    trace = MemoryTrace()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        yield trace
    with tempfile.TemporaryDirectory(prefix="nbgpu-memory-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    _replay(events, trace, _DEVICE_TYPES[device.type])


def _replay(events: Sequence[Mapping[str, Any]], trace: MemoryTrace, device_type: int) -> None:
    """Fill the trace's log from the profiler's events, in the order of their times.

    Args:
        events: the events of the profiler's Chrome trace; times are in microseconds.
        trace: its marks say which category a storage has; its log is filled.
        device_type: torch's number of the device type whose memory counts.
    """
    changes: list[tuple[float, Callable[[], None]]] = []
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    gathering = [(e["ts"], e["ts"] + e["dur"]) for e in spans if str(e["name"]).startswith(_GATHERING)]
    times_us: list[float] = []
    """The time of each change in the log, by which allocations are compared with the spans of kernels."""
    log = trace.log

    def apply_event(at_us: float, address: int, num_bytes: int) -> None:
        """Log an allocation (positive bytes) or a free, and the time of each change."""
        if num_bytes > 0:
            is_gathered = any(begin <= at_us <= end for begin, end in gathering)
            if log.holds(address):
                # The log first frees an allocation whose end was missed, which is a change of its own.
                times_us.append(at_us)
            log.allocate(address, num_bytes, GATHERED if is_gathered else ACTIVATIONS)
            times_us.append(at_us)
        elif log.holds(address):
            log.free(address)
            times_us.append(at_us)

    for event in events:
        name = str(event["name"])
        # A range with the number of a mark, which `MemoryTrace.note` has put among the events.
        if name.startswith(_MARK) and event.get("cat") == "user_annotation":
            changes.append((event["ts"], partial(log.label, *trace.marks[int(name.removeprefix(_MARK))])))
    memory_events = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == device_type]
    for at_us, address, num_bytes in _with_missed_frees(memory_events, gathering):
        changes.append((at_us, partial(apply_event, at_us, address, num_bytes)))
    for _, apply in sorted(changes, key=lambda timed: timed[0]):
        apply()
    for allocation in _scratch_at_peak(log, times_us, spans):
        allocation.category = SCRATCH


def _with_missed_frees(
    events: Sequence[Mapping[str, Any]], gathering: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, int, int]]:
    """Yield (time, address, bytes) of the profiler's memory events; a free has negative bytes.

    The frees of the copies that gloo sends for FSDP are missing, because gloo's threads free them, which the
    profiler does not see. So memory that was allocated during FSDP's communication and never freed counts as
    freed at the end of that communication.
    """
    allocated: dict[int, float] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        at_us, address, num_bytes = event["ts"], event["args"]["Addr"], event["args"]["Bytes"]
        yield at_us, address, num_bytes
        allocated_us = allocated.pop(address, None)
        if num_bytes > 0:
            if allocated_us is not None:
                # The address is allocated again. A missed free before now is added. A later one is not: it
                # would free the new allocation, and `AllocationLog.allocate` frees the old one by itself.
                missed = _at_end_of_exchange(allocated_us, address, gathering)
                yield from (free for free in missed if free[0] < at_us)
            allocated[address] = at_us
    for address, allocated_us in allocated.items():
        yield from _at_end_of_exchange(allocated_us, address, gathering)


def _at_end_of_exchange(
    allocated_us: float, address: int, gathering: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, int, int]]:
    """Yield a free at the end of the FSDP communication in which a piece of memory was allocated; nothing if
    it was allocated elsewhere."""
    ends = [end for begin, end in gathering if begin <= allocated_us <= end]
    if ends:
        yield max(ends), address, -1


def _scratch_at_peak(
    log: AllocationLog, times: Sequence[float], spans: Sequence[Mapping[str, Any]]
) -> Iterator[Allocation]:
    """Yield the allocations that a kernel made before the peak and freed before it ended."""
    if not times:
        return
    peak_us = times[log.num_changes_at_peak - 1]
    kernels = [
        (span["ts"], span["ts"] + span["dur"])
        for span in spans
        if str(span["name"]).startswith("aten::") and span["ts"] <= peak_us <= span["ts"] + span["dur"]
    ]
    if not kernels:
        return
    # The outermost operator: those inside it are parts of its work.
    begin, end = max(kernels, key=lambda kernel: kernel[1] - kernel[0])
    for allocation in log.allocations_at_peak():
        ended = times[allocation.end] if allocation.end is not None else float("inf")
        if not allocation.is_labelled and times[allocation.begin] >= begin and ended <= end:
            yield allocation
