"""An enforced bound on a rank's memory: an allocation beyond it is refused where it is requested.

On a GPU, torch's caching allocator refuses it. Memory that is not allocated through it, such as CUDA's own
context, NCCL's buffers and other libraries' memory, is not bounded. On the CPU the kernel refuses it
(RLIMIT_DATA): this bounds private writable memory, of torch, NumPy and Python alike. Memory that is shared
with other processes and mapped files are not bounded.
"""

from __future__ import annotations

import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nbgpu.engine.memory import heap
from nbgpu.errors import ConfigError
from nbgpu.text.sizes import in_words

_RESERVE_BYTES = 64 * 2**20
"""What a rank may take beyond its limit to report a failure."""

_STACK_BYTES = 8 * 2**20

_KEEP_PERIOD_S = 0.1

_lock = threading.Lock()
_keeper: threading.Thread | None = None
_beyond_bytes: int | None = None
"""The bytes that the process may take now beyond its limit, or below it if negative; None removes the
limit."""
_num_threads = 0
"""The number of threads when the limit was set."""
_gpu_limit_bytes: int | None = None
_most_data_bytes: int | None = None
"""The limit of a CPU rank as Linux counts it (VmData); None if the rank has none."""


def gpu_limit_bytes() -> int | None:
    """Return the limit that was set for this process's GPU; None if there is none."""
    return _gpu_limit_bytes


def bounds_cpu() -> bool:
    """Return whether this process is a CPU rank with a limit."""
    return _most_data_bytes is not None


def enforce(limit_bytes: int, device: torch.device) -> None:
    """Refuse this process any memory on the device beyond the limit, from this call on.

    Args:
        limit_bytes: on the CPU, the limit of the rank's resident memory, including Python and its libraries;
            on a GPU, that of the memory that torch allocates.

    Raises:
        ConfigError: a CPU rank has more than that already.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        global _gpu_limit_bytes
        _gpu_limit_bytes = limit_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
        return
    resident_bytes = _process_bytes("VmRSS")
    if limit_bytes <= resident_bytes:
        raise ConfigError(
            f"memory_limit = {in_words(limit_bytes)} is less than a CPU rank has when it has just started, "
            f"{in_words(resident_bytes)} for Python and torch. Give more"
        )
    # The kernel counts reserved memory, which is more than resident memory, for example by the stacks of
    # threads. The difference at this moment is added to the limit, so that it does not count against the
    # rank.
    global _most_data_bytes, _num_threads
    # The kernel still counts freed memory that the C library keeps.
    heap.keep_little()
    _most_data_bytes = _process_bytes("VmData") + limit_bytes - resident_bytes
    _num_threads = _threads()
    tighten()


@contextmanager
def enforced_meanwhile(limit_bytes: int) -> Iterator[None]:
    """Enforce a limit on a CPU rank that has none, inside the context."""
    global _most_data_bytes
    enforce(limit_bytes, torch.device("cpu"))
    try:
        yield
    finally:
        _allow_beyond(None)
        _most_data_bytes = None


def tighten(spare_bytes: int = 0) -> None:
    """Restore the limit after `lifted`, or set it `spare_bytes` lower. Call before a person's code runs."""
    if _most_data_bytes is not None:
        _allow_beyond(-spare_bytes)


@contextmanager
def lifted() -> Iterator[None]:
    """Lift the limit of a CPU rank inside the context; do nothing on a rank that has none, as on a GPU.

    Afterwards the rank may take a reserve beyond its limit until `tighten` is called, so that a rank at its
    limit can describe a failure and send it to the client.
    """
    if _most_data_bytes is None:
        yield
        return
    _allow_beyond(None)
    try:
        yield
    finally:
        _allow_beyond(_RESERVE_BYTES)


def _allow_beyond(beyond_bytes: int | None) -> None:
    """Allow the process this much beyond its limit from this call on. None removes the limit; a negative
    number keeps a reserve below it."""
    global _beyond_bytes, _keeper
    with _lock:
        # Start the thread first, because the limit may leave no room for its stack.
        if _keeper is None:
            keeper = threading.Thread(target=_keep, name="nbgpu-memory-limit", daemon=True)
            keeper.start()
            _keeper = keeper
        _beyond_bytes = beyond_bytes
        _set_rlimit()


def _keep() -> None:
    """Raise the limit for the stacks of new threads: each stack counts as a whole, and is hardly used."""
    while True:
        time.sleep(_KEEP_PERIOD_S)
        with _lock:
            if _most_data_bytes is not None and _beyond_bytes is not None:
                _set_rlimit()


def _set_rlimit() -> None:
    """Set the soft RLIMIT_DATA from the limit and the number of threads. The caller holds `_lock`."""
    most_bytes = resource.RLIM_INFINITY if _beyond_bytes is None else _most() + _beyond_bytes
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    # A process without privileges may not set more than the hard limit.
    if hard_bytes != resource.RLIM_INFINITY:
        most_bytes = hard_bytes if most_bytes == resource.RLIM_INFINITY else min(most_bytes, hard_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard_bytes))


def _most() -> int:
    """Return the limit in bytes of VmData, with the stacks of the threads that were started since it was
    set."""
    assert _most_data_bytes is not None, "there is a limit"
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = _STACK_BYTES
    return _most_data_bytes + max(0, _threads() - _num_threads) * stack_bytes


def left_bytes() -> int | None:
    """Return the memory that this process can still allocate under its limit on the CPU, in bytes; None if
    there is no limit."""
    return None if _most_data_bytes is None else max(0, _most() - _process_bytes("VmData"))


def peak_resident_bytes() -> int:
    """Return this process's peak of resident memory since it began, or since its count was last reset."""
    return _process_bytes("VmHWM")


def _process_bytes(name: str) -> int:
    """Return one of Linux's counts of this process's memory, in bytes."""
    return _status(name) * 1024


def _threads() -> int:
    """Return the number of threads of this process, including those that Python does not know."""
    return _status("Threads")


def _status(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, f"Linux counts {name} of every process"
    return int(match[1])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore interrupts and lift the rank's memory limit while a failure is described. Call on the main
    thread.

    The client repeats its interrupt until the rank has replied; raised here, it would only spoil the reply.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with lifted():
            yield
    finally:
        signal.signal(signal.SIGINT, previous)
