"""Measures what the tensors of a block of code take, with the record that torch's allocators make of it.

torch's profiler notes every piece of memory that the allocator of a device hands out or takes back, also
those that a kernel takes for itself. Not included is what libraries take from elsewhere, such as the kernels
that oneDNN compiles, the buffers of gloo and NCCL, and what an allocator keeps.
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

from nbgpu.engine.memory.tape import ACTIVATIONS, GATHERED, SCRATCH, Piece, Tape

_log = logging.getLogger("nbgpu.memory")

_MARK = "nbgpu memory "
_GATHERING = ("FSDP::all_gather", "FSDP::post_backward_reduce")
"""The beginnings of the names of the ranges in which FSDP takes memory for its exchange."""
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
"""torch's numbers of device types (c10/core/DeviceType.h)."""


@dataclass
class Traced:
    """What a block of code took, which is known after it."""

    tape: Tape = field(default_factory=Tape)
    marks: list[tuple[str, tuple[int, ...] | None]] = field(default_factory=list)

    def note(self, category: str, tensors: Iterable[Tensor] | None) -> None:
        """Say what these tensors are for, or with None all others that are held now."""
        keys = None if tensors is None else tuple(t.untyped_storage().data_ptr() for t in tensors)
        with record_function(f"{_MARK}{len(self.marks)}"):
            self.marks.append((category, keys))


@contextmanager
def traced(device: torch.device) -> Iterator[Traced]:
    """Record the memory that tensors take on a device, inside the context.

    Raises:
        RuntimeError: a profiler runs already.
    """
    found = Traced()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        yield found
    with tempfile.TemporaryDirectory(prefix="nbgpu-memory-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    _read(events, found, _DEVICE_TYPES[device.type])


def _read(events: Sequence[Mapping[str, Any]], found: Traced, device_type: int) -> None:
    """Play the profiler's events through."""
    changes: list[tuple[float, Callable[[], None]]] = []
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    gathering = [(e["ts"], e["ts"] + e["dur"]) for e in spans if str(e["name"]).startswith(_GATHERING)]
    times: list[float] = []
    """When each change of the tape happened."""
    tape = found.tape

    def change(time: float, key: int, num_bytes: int) -> None:
        if num_bytes > 0:
            is_gathered = any(begin <= time <= end for begin, end in gathering)
            if tape.holds(key):
                times.append(time)
            tape.take(key, num_bytes, GATHERED if is_gathered else ACTIVATIONS)
            times.append(time)
        elif tape.holds(key):
            tape.give_back(key)
            times.append(time)

    def claim(category: str, keys: tuple[int, ...] | None) -> None:
        if keys is None:
            tape.claim_others(category)
        else:
            tape.claim(category, keys)

    for event in events:
        name = str(event["name"])
        if name.startswith(_MARK) and event.get("cat") == "user_annotation":
            changes.append((event["ts"], partial(claim, *found.marks[int(name.removeprefix(_MARK))])))
    of_device = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == device_type]
    for at_us, key, num_bytes in _with_missed_ends(of_device, gathering):
        changes.append((at_us, partial(change, at_us, key, num_bytes)))
    for _, apply in sorted(changes, key=lambda change: change[0]):
        apply()
    for piece in _scratch(tape, times, spans):
        piece.category = SCRATCH


def _with_missed_ends(
    events: Sequence[Mapping[str, Any]], gathering: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, int, int]]:
    """Yield (time, address, bytes taken or below 0 given back) of the profiler's memory events.

    gloo's threads free copies that FSDP's thread had them make, and the profiler does not see those threads.
    Such a copy is done with when FSDP's exchange is.
    """
    taken: dict[int, float] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        at_us, address, num_bytes = event["ts"], event["args"]["Addr"], event["args"]["Bytes"]
        yield at_us, address, num_bytes
        before_us = taken.pop(address, None)
        if num_bytes > 0:
            if before_us is not None:
                yield from _at_end_of_exchange(before_us, address, gathering)
            taken[address] = at_us
    for address, before_us in taken.items():
        yield from _at_end_of_exchange(before_us, address, gathering)


def _at_end_of_exchange(
    taken_us: float, address: int, gathering: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, int, int]]:
    ends = [end for begin, end in gathering if begin <= taken_us <= end]
    if ends:
        yield max(ends), address, -1


def _scratch(tape: Tape, times: Sequence[float], spans: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yield the pieces that a kernel held at the peak, and gave back before it ended."""
    if not times:
        return
    peak_us = times[tape.peak_after - 1]
    kernels = [
        (span["ts"], span["ts"] + span["dur"])
        for span in spans
        if str(span["name"]).startswith("aten::") and span["ts"] <= peak_us <= span["ts"] + span["dur"]
    ]
    if not kernels:
        return
    begin, end = max(kernels, key=lambda kernel: kernel[1] - kernel[0])
    for piece in tape.pieces_at_peak():
        ended = times[piece.end] if piece.end is not None else float("inf")
        if not piece.is_claimed and times[piece.begin] >= begin and ended <= end:
            yield piece
