"""Memory that two processes of one host share for a moment, so that large values travel without a socket.

The memory is a memfd, a file with no name in any folder. It is freed when the last process has closed it or
has ended, in whatever way, and the size of /dev/shm does not limit it. Its address travels over ipyparallel's
channel, and the other process opens it through /proc, to which Linux gives only the same user access.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_CHUNK_BYTES = 64 * 1024**2
"""The size of one system call, because an interrupt does not end a call."""
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Address:
    """The process and the descriptor under which shared memory is open."""

    boot: str
    """The id of the host's present boot, because the numbers mean nothing on another host."""
    pid: int
    descriptor: int
    device: int
    inode: int
    """The inode, so that a reused descriptor is never mistaken for memory that is gone."""


@contextmanager
def created() -> Iterator[int]:
    """Give a descriptor of new shared memory, which other processes reach by its `address` while the block
    lasts."""
    descriptor = os.memfd_create("nbgpu")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def address(descriptor: int) -> Address:
    """The address by which another process can open this memory."""
    there = os.fstat(descriptor)
    return Address(_boot(), os.getpid(), descriptor, there.st_dev, there.st_ino)


@contextmanager
def opened(where: Address) -> Iterator[int | None]:
    """Give a descriptor of another process's shared memory, or None where it is gone or cannot be reached
    from here."""
    descriptor = _open(where)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(where: Address) -> int | None:
    """Open another process's memory through its entry in /proc; None if the process is on another host, or if
    the memory is gone."""
    if where.boot != _boot():
        return None
    path = Path(f"/proc/{where.pid}/fd/{where.descriptor}")
    try:
        # The file is checked before it is opened, because opening something else may have effects, and again
        # afterwards, because it may have been exchanged in between.
        if not _is_it(path.stat(), where):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _is_it(os.fstat(descriptor), where):
        return descriptor
    os.close(descriptor)
    return None


def _is_it(found: os.stat_result, where: Address) -> bool:
    return (found.st_dev, found.st_ino) == (where.device, where.inode)


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def mapped(descriptor: int, offset: int, size_bytes: int) -> Any:
    """A part of shared memory as a private buffer, so that no other process sees what is written to it.

    A page is copied when it is first written to. The memory is freed with the last reference to the buffer,
    even if the descriptor was closed long before. Python's `mmap` would keep a descriptor open for each
    mapping.
    """
    flags = mmap.MAP_PRIVATE
    start = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if start == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}, mapping {size_bytes} bytes")
    buffer = (ctypes.c_ubyte * size_bytes).from_address(start)
    # At the end of the process there may still be arrays in the buffer, so it is not unmapped then.
    weakref.finalize(buffer, _libc.munmap, start, size_bytes).atexit = False
    return buffer


def write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. This is faster than copying into a mapping, because no page is cleared or faulted
    in first."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _CHUNK_BYTES], offset + done)


def read(descriptor: int, offset: int, size_bytes: int) -> bytearray:
    """A copy of a part of shared memory."""
    data = bytearray(size_bytes)
    done = 0
    while done < size_bytes:
        num_read = os.preadv(descriptor, [memoryview(data)[done:]], offset + done)
        if not num_read:
            raise OSError(f"the shared memory ends {size_bytes - done} bytes too early")
        done += num_read
    return data
