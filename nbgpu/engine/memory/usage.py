"""The memory that a process holds, the values that hold it, and its release after a failure."""

from __future__ import annotations

import gc
import itertools
import re
import resource
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbgpu.engine.frames import chain_of, clear
from nbgpu.engine.group import torch_settings
from nbgpu.engine.memory import heap
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.errors import NbgpuError
from nbgpu.text.sizes import UNITS, in_words

_MESSAGES_OF_OTHER_TYPES = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "'out of memory'",  # NCCL's
)
"""Parts of the message of a RuntimeError: neither the CPU's allocator nor CUDA's libraries have an exception
type of their own for it."""

_ONEDNN = "could not create a primitive"
"""The whole message of oneDNN when it gets no memory for a kernel. If more words follow, oneDNN has no kernel
for the operation."""

_ASKED = re.compile(r"allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMGTPE]iB)")

_NUM_ITEMS_SEEN = 10_000
"""The number of items of a container that are examined, so that a list of a million numbers does not delay
the message."""


_NOTE_ON_ONEDNN = (
    "oneDNN, which computes convolutions, cannot make another kernel in this process: this rank computes them without it "
    "from now on, several times slower. A new process has it again, without the rank's variables: %nbgpu restart --rank {rank}"
)
_widths = itertools.count(1013)
"""Widths for trial convolutions. Each is used once, because oneDNN has kept the kernels of earlier shapes."""


@dataclass(frozen=True)
class Usage:
    """The memory that this process holds of a device, in bytes.

    On a GPU `used` is what torch has allocated, and `reserved` what torch has taken from the driver for that.
    On the CPU both are the process's resident memory.
    """

    used_bytes: int
    peak_bytes: int
    reserved_bytes: int
    could_have_bytes: int
    """The most that this process could hold while all other processes keep what they have."""
    total_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Usage:
        """Return the memory held at this moment.

        On a GPU the peak is that since `begin_peak`, or that of the process; on the CPU it is the present
        value.
        """
        if device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            # Memory that torch has reserved and not allocated is free for this process alone.
            could_have_bytes = torch.cuda.memory_reserved(device) + free_bytes
            return cls(
                used_bytes=torch.cuda.memory_allocated(device),
                peak_bytes=torch.cuda.max_memory_allocated(device),
                reserved_bytes=torch.cuda.max_memory_reserved(device),
                could_have_bytes=min(could_have_bytes, memory_limit.gpu_limit_bytes() or total_bytes),
                total_bytes=total_bytes,
            )
        process, host = psutil.Process().memory_info(), psutil.virtual_memory()
        left_bytes = host.available
        address_space_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
        if address_space_bytes != resource.RLIM_INFINITY:
            left_bytes = min(left_bytes, max(0, address_space_bytes - process.vms))
        if (within_limit_bytes := memory_limit.left_bytes()) is not None:
            left_bytes = min(left_bytes, within_limit_bytes)
        return cls(process.rss, process.rss, process.rss, process.rss + left_bytes, host.total)

    def in_words(self, device: torch.device) -> str:
        """Return '1.2 GiB resident; the machine has ...'; `device` is the one that was measured."""
        left = in_words(max(0, self.could_have_bytes - self.reserved_bytes))
        if device.type == "cuda":
            return (
                f"{in_words(self.peak_bytes)} allocated, {in_words(self.reserved_bytes)} reserved; {device} has "
                f"{in_words(self.total_bytes)}, of which {left} were left for this rank"
            )
        now = f", {in_words(self.used_bytes)} at the end" if self.used_bytes < self.peak_bytes else ""
        return (
            f"{in_words(self.peak_bytes)} resident{now}; the machine has {in_words(self.total_bytes)}, of which {left} were left "
            "for this rank"
        )


def begin_peak(device: torch.device) -> None:
    """Reset the count of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # Not every container permits this; the peak is then that of the process's whole life.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the most that this process held on the device since `begin_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory_limit.peak_resident_bytes()


def is_exhausted(error: BaseException) -> bool:
    """Return whether an exception, or the one it was raised from, says that there is no more memory."""
    return _root(error) is not None


def lacked_a_kernel(error: BaseException) -> bool:
    """Return whether an error says that oneDNN could not make a kernel, because it got no memory for its
    machine code."""
    return str(_root(error)) == _ONEDNN


def _root(error: BaseException | None) -> BaseException | None:
    """Return the exception that says that there is no more memory, in a chain of `raise ... from`, such as
    those in which MONAI wraps the exceptions of transforms; None if there is none."""
    # Errors of nbgpu are left out, because they may quote the error of another rank.
    while error is not None and not isinstance(error, NbgpuError):
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return error
        if isinstance(error, RuntimeError) and (
            str(error) == _ONEDNN or any(part in str(error) for part in _MESSAGES_OF_OTHER_TYPES)
        ):
            return error
        error = error.__cause__
    return None


def refused(error: BaseException, device: torch.device) -> tuple[torch.device, int]:
    """Return (the device that had no more memory, this rank's or the CPU; the bytes requested, 0 if unknown).

    Args:
        error: an exception for which `is_exhausted` holds.
        device: this rank's.
    """
    root = _root(error)
    assert root is not None, "the error is of another kind"
    return device if _is_of_gpu(root) else torch.device("cpu"), asked_bytes(str(root))


def _is_of_gpu(root: BaseException) -> bool:
    return "CUDA" in str(root).upper() or "CUDNN" in str(root) or "CUBLAS" in str(root)


def asked_bytes(message: str) -> int:
    """Return the bytes requested, parsed from the message of torch or numpy; 0 if the message has no such
    number."""
    match = _ASKED.search(message)
    return round(float(match["number"]) * 1024 ** UNITS.index(match["unit"])) if match else 0


# ---- a cell --------------------------------------------------------------------------------------------


def largest(named: Iterable[tuple[str, Any]], device: torch.device) -> list[tuple[str, int]]:
    """Return the values that hold memory on the device, largest first.

    Memory that two names share, such as a tensor and a view of it, counts for the first of them.

    Args:
        named: (name, value) of each variable.
        device: the device whose memory counts.

    Returns:
        (the name with a description of the value, its bytes) for each value that holds any.
    """
    seen: set[int] = set()
    holders = []
    for name, value in named:
        parts = [part for part in parts_in(value, depth=3) if _occupies(part, device)]
        num_bytes = 0
        for part in parts:
            start, size = _address_and_bytes(part)
            if start not in seen:
                seen.add(start)
                num_bytes += size
        if num_bytes:
            holders.append((f"{name}: {_described(value, len(parts))}", num_bytes))
    return sorted(holders, key=lambda entry: -entry[1])


def parts_in(value: Any, depth: int) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield the tensors and arrays that a value holds, including gradients.

    Args:
        value: a tensor, an array, a module, an optimizer, or a container of these; others hold none.
        depth: how many levels of containers are searched.
    """
    if isinstance(value, Tensor):
        yield value
        # Reading the gradient of a tensor that is not a leaf gives a warning.
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, nn.Module):
        for tensor in [*value.parameters(), *value.buffers()]:
            yield from parts_in(tensor, depth)
    elif isinstance(value, Optimizer):
        for values in value.state.values():
            yield from parts_in(list(values.values()), depth)
    elif depth and isinstance(value, list | tuple | set | Mapping):
        for item in islice(value.values() if isinstance(value, Mapping) else value, _NUM_ITEMS_SEEN):
            yield from parts_in(item, depth - 1)


def _occupies(part: Tensor | np.ndarray[Any, Any], device: torch.device) -> bool:
    """Return whether a tensor or array is in the memory of a device; sparse tensors have no storage to look
    at."""
    if isinstance(part, np.ndarray):
        return device.type == "cpu"
    same_kind = part.device.type == device.type and part.layout is torch.strided
    return same_kind and (device.index is None or part.device.index == device.index)


def _address_and_bytes(part: Tensor | np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return (address, bytes) of the whole memory that a tensor, or a view of one, keeps alive."""
    if isinstance(part, Tensor):
        storage = part.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while isinstance(part.base, np.ndarray):
        part = part.base
    return part.ctypes.data, part.nbytes


def _described(value: Any, num_parts: int) -> str:
    """Describe a value in the list of variables that hold memory: '3 x 4, float32' or 'Linear with 2
    tensors'."""
    if isinstance(value, Tensor | np.ndarray):
        kind = str(value.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, value.shape)) or "a single number"
        return f"{shape}, {kind}" + (", with its gradient" if num_parts > 1 else "")
    return f"{type(value).__name__} with {num_parts} tensor{'s' if num_parts > 1 else ''}"


def let_go(error: BaseException | None) -> None:
    """Free the tensors that an error keeps alive: the local variables of the functions in its traceback, and
    the activations of a backward pass that it cut off.

    A traceback keeps the frames of its functions alive. Python keeps the last traceback in
    `sys.last_traceback`, and IPython a few more.
    """
    for raised in chain_of(error):
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            # Frames that are still running cannot be cleared, and need not be.
            if clear(frame):
                # Up to Python 3.12 a frame has a copy of its locals once they were read. Reading them again
                # updates the copy, which frees the old values.
                _ = frame.f_locals
    _empty_autograd_queue()


def _empty_autograd_queue() -> None:
    """Drop the nodes that a failed backward pass did not reach, and with them the activations that they have
    saved.

    On the CPU autograd keeps these nodes in a queue of the thread until the thread's next backward pass
    begins. A training step for which the memory is then too small would fail in its forward pass each time,
    so a tiny backward pass is done here.
    """
    with torch.inference_mode(False):
        torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True).backward()


def free() -> None:
    """Release memory that is no longer referenced: reference cycles, and blocks that torch and the C library
    keep for later allocations."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # Freed blocks that the C library keeps accumulate.
    heap.give_back()


def asked_in_words(asked: int) -> str:
    """Return the amount of memory that was requested, as a text; 0 bytes stand for an unknown amount."""
    return in_words(asked) if asked else "an amount that Python does not say"


def mend_onednn(error: BaseException, rank: int) -> str:
    """Switch oneDNN off in this process if an error has broken it for good; oneDNN computes the CPU's
    convolutions. Call where the memory limit is lifted, on the thread that raised the error.

    oneDNN writes a kernel of machine code for each new shape. Its assembler keeps the first error in a
    variable of the thread: a thread that was once refused the memory for a kernel never gets another one,
    even when memory is free again.

    Returns:
        A sentence about it for the person; empty if nothing is broken.
    """
    if not lacked_a_kernel(error) or _makes_kernels():
        return ""
    torch_settings.forbid_onednn()
    return _NOTE_ON_ONEDNN.format(rank=rank)


def _makes_kernels() -> bool:
    """Return whether oneDNN can still make a kernel on this thread, by a small convolution of a shape that
    was not computed before."""
    image = torch.ones(1, 8, 8, next(_widths), dtype=torch.float32, device="cpu")
    weight = torch.ones(8, 8, 3, 3, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            torch.nn.functional.conv2d(image, weight)
    except RuntimeError as error:
        if not lacked_a_kernel(error):
            raise
        return False
    return True
