"""Temporary shared memory of two processes of one host, to transfer large values without a socket.

The memory is a memfd, an anonymous file. It is freed when the last process has closed it or has ended, and is
not limited by the size of /dev/shm. Its address is sent over ipyparallel's channel, and the other process
opens it through /proc, to which Linux gives access only to the same user.
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
"""The largest number of bytes per system call. An interrupt is handled only between calls."""
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Address:
    """The process and the descriptor under which shared memory is open."""

    boot: str
    """The id of the host's present boot, because a pid means another process on another host."""
    pid: int
    descriptor: int
    device: int
    inode: int
    """With `device`, the identity of the memory, because the descriptor may be reused after it is closed."""


@contextmanager
def created() -> Iterator[int]:
    """Provide a descriptor of new shared memory, which other processes can open by its `address` during the
    block."""
    descriptor = os.memfd_create("nbgpu")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def address(descriptor: int) -> Address:
    """Return the address by which another process can open this memory."""
    status = os.fstat(descriptor)
    return Address(_boot(), os.getpid(), descriptor, status.st_dev, status.st_ino)


@contextmanager
def opened(where: Address) -> Iterator[int | None]:
    """Provide a descriptor of another process's shared memory for the block; None if the memory was freed or
    is on another host."""
    descriptor = _open(where)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(where: Address) -> int | None:
    """Open another process's memory through its entry in /proc; None if the memory was freed or is on another
    host."""
    if where.boot != _boot():
        return None
    path = Path(f"/proc/{where.pid}/fd/{where.descriptor}")
    try:
        # The file is checked before it is opened, because opening another file may have side effects, and
        # again afterwards, because it may have been replaced in between.
        if not _is_memory(path.stat(), where):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _is_memory(os.fstat(descriptor), where):
        return descriptor
    os.close(descriptor)
    return None


def _is_memory(status: os.stat_result, where: Address) -> bool:
    """Return whether a file is the memory of an address."""
    return (status.st_dev, status.st_ino) == (where.device, where.inode)


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def mapped(descriptor: int, offset: int, size_bytes: int) -> Any:
    """Map a part of shared memory as a private (copy-on-write) buffer, whose changes other processes do not
    see.

    The memory is freed with the last reference to the buffer; the descriptor may be closed before. Python's
    `mmap` is not used because it keeps a descriptor open for each mapping.
    """
    flags = mmap.MAP_PRIVATE
    start = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if start == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}, mapping {size_bytes} bytes")
    buffer = (ctypes.c_ubyte * size_bytes).from_address(start)
    # It is not unmapped at the end of the process, when arrays may still use the buffer.
    weakref.finalize(buffer, _libc.munmap, start, size_bytes).atexit = False
    return buffer


def write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at an offset. This is faster than copying into a mapping, because no pages are
    cleared or faulted in first."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _CHUNK_BYTES], offset + done)


def read(descriptor: int, offset: int, size_bytes: int) -> bytearray:
    """Return a copy of a part of shared memory."""
    data = bytearray(size_bytes)
    done = 0
    while done < size_bytes:
        num_read = os.preadv(descriptor, [memoryview(data)[done:]], offset + done)
        if not num_read:
            raise OSError(f"the shared memory ends {size_bytes - done} bytes too early")
        done += num_read
    return data
