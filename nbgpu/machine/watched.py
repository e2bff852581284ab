"""Lets the processes of a cluster watch each other and end together.

The engines, their parent process and the controller do so, because engines that outlive their notebook would
keep the GPUs' memory. A process is watched through a file descriptor that becomes readable when the process
ends.

The descriptors are pidfds if the kernel has them. Otherwise each watched process holds a named pipe in its
cluster's folder open, which the kernel closes however the process ends. A process whose own code closes the
pipe counts as ended.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from nbgpu.machine.processes import ProcessId, has_pidfds
from nbgpu.protocol.cluster_processes import KEPT

_held: set[int] = set()
"""This process's ends of the pipes through which others watch it."""
_shown: dict[Path, int] = {}
"""The ends of named pipes among these, by the cluster's folder."""

_POLL_S = 0.1
"""The time after which the end of a parent process is noticed without pidfds."""


def show(folder: Path) -> None:
    """Let the processes of the cluster with this folder watch this one, until `hide`. Does nothing if they
    use pidfds."""
    if not has_pidfds():
        path = _pipe(folder, os.getpid())
        # Read and write, because to open a pipe without readers only for writing fails.
        _shown[folder] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _held.add(_shown[folder])


def hide(folder: Path) -> None:
    """Undo `show`. The processes that watch this one see it end."""
    shown = _shown.pop(folder, None)
    if shown is not None:
        _held.discard(shown)
        os.close(shown)


def watch(pid: int, folder: Path) -> int:
    """Return a descriptor that becomes readable when the process with this pid ends. The caller closes it.

    Args:
        pid: the process, which calls `show` with the same folder. Without pidfds, its end is not noticed if
            it ends after this call but before its call of `show`; for children `fork` has no such gap.
        folder: the cluster's folder.

    Raises:
        ProcessLookupError: the process has ended.
    """
    if has_pidfds():
        return os.pidfd_open(pid)
    try:
        descriptor = os.open(_pipe(folder, pid), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ProcessLookupError(f"the cluster of process {pid} has ended: {folder} is gone") from None
    try:
        # The pipe is already open, so that if the process still runs, its end will be noticed.
        ProcessId.of(pid)
    except ProcessLookupError:
        os.close(descriptor)
        raise
    return descriptor


def fork() -> tuple[int, int]:
    """Fork this process.

    Returns:
        In the parent, the child's pid and a descriptor that becomes readable when the child ends. In the
        child, 0 and -1.
    """
    if has_pidfds():
        pid = os.fork()
        return pid, os.pidfd_open(pid) if pid else -1
    of_parent, of_child = os.pipe()
    pid = os.fork()
    if pid:
        os.close(of_child)
        return pid, of_parent
    os.close(of_parent)
    _held.add(of_child)
    return 0, -1


def reap(pid: int) -> int:
    """Return the wait status of a child whose descriptor from `fork` is readable."""
    if not has_pidfds():
        # If code in the child has closed the pipe, the child still runs and can no longer be watched. The
        # signal does not change the status of a child that has ended.
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _pipe(folder: Path, pid: int) -> Path:
    """Return the named pipe of a process. The watched or the watching process creates it, whichever needs it
    first."""
    path = folder / f"alive-{pid}"
    with suppress(FileExistsError):
        os.mkfifo(path, mode=0o600)
    return path


def _close_in_child() -> None:
    """Close the pipes in a forked child, which may outlive its parent."""
    for descriptor in _held:
        with suppress(OSError):  # the user's code may have closed it
            os.close(descriptor)
    _held.clear()
    _shown.clear()


os.register_at_fork(after_in_child=_close_in_child)


class LifetimeWatch:
    """Watches the processes of a cluster without which this process must end, too.

    Args:
        folder: the cluster's folder.
        owner: a descriptor, from `watch`, of the process that started the cluster. That process may end if
            the cluster is marked to be kept. A descriptor is needed because an engine may be forked long
            after the start, when the owner's pid may belong to another process.
        others: the pids of processes that must not end.

    Raises:
        ProcessLookupError: one of the others has ended already.
    """

    def __init__(self, folder: Path, owner: int, others: Iterable[int]) -> None:
        self._kept = folder / KEPT
        self._owner = owner
        self.fds = {self._owner, *(watch(pid, folder) for pid in others)}
        """The descriptors to pass to `select`."""

    def over(self, ready: Collection[int]) -> bool:
        """Return whether this process must end.

        Args:
            ready: the readable descriptors among `fds`.
        """
        if self._owner in ready and self._kept.exists():
            self.fds.discard(self._owner)
        return not self.fds.isdisjoint(ready)


def end_with(parent_pid: int) -> None:
    """Start a thread that ends this process as soon as its parent ends; end this process at once if the
    parent has already ended."""
    try:
        parent = os.pidfd_open(parent_pid) if has_pidfds() else None
    except ProcessLookupError:
        os._exit(1)
    # This check after the pidfd was opened ensures that the pidfd is not that of a later process with the
    # same pid.
    if os.getppid() != parent_pid:
        os._exit(1)

    def wait() -> None:
        if parent is not None:
            select.select([parent], [], [])
        else:
            while os.getppid() == parent_pid:
                time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=wait, name="nbgpu-lifetime", daemon=True).start()
