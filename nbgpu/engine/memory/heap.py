"""Settings of the C library for freed memory: keep it for the next allocation, or give it back to the kernel.

glibc gives large pieces back at once, and the end of its heap when 128 KiB to 64 MiB of it are free. A
training step on the CPU frees its activations and the next step allocates as much again: each time the kernel
hands out fresh pages, and fills them with zeros. That took 11 % of a step's CPU time with an autoencoder on
patches of 32^3 voxels, and 45 % on 64^3.

Other C libraries have no such calls, and nothing changes with them. Nor does it in a thread that was once
refused memory: glibc then continues with another heap, to which these settings do not apply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""Constants of malloc.h."""
_MOST_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The highest value to which glibc raises its threshold by itself; the threshold for trimming is then twice
as high."""
_DEFAULT_MMAP_MAX = 65536
_LARGEST_KEPT_BYTES = 2**18


@contextmanager
def kept() -> Iterator[None]:
    """Keep all freed memory in the process, whatever its size, inside the context. The process then needs
    more memory: a quarter more with that autoencoder on 64^3."""
    _set(_M_TRIM_THRESHOLD, -1)
    # No piece is mapped on its own: a piece that is mapped goes back to the kernel when it is freed.
    _set(_M_MMAP_MAX, 0)
    try:
        yield
    finally:
        _set(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        _set(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD_BYTES)
        _set(_M_TRIM_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD_BYTES)
        give_back()


def keep_little() -> None:
    """Give pieces of more than 256 KiB back to the kernel as soon as they are freed."""
    _set(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


def give_back() -> None:
    """Give the memory that is free now back to the kernel."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(option: int, value: int) -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(option, value)
