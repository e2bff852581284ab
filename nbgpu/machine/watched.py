"""Lets the processes of a cluster watch each other and end together.

The engines, their parent and the controller do so: engines that outlive their notebook would hold the GPUs'
memory, and nothing would free it. Processes are watched through descriptors that can be read once a process
has ended.

The descriptors are pidfds where the kernel has them. Elsewhere each process that is watched holds a named
pipe in its cluster's folder open, and those that watch it see the pipe close, which the kernel does however
the process ends. A process whose code closes that pipe counts as ended.
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
"""The ends of the named pipes among these, by folder."""


_POLL_S = 0.1
"""Without pidfds the end of a parent is noticed after this time at the latest."""


def show(folder: Path) -> None:
    """Let the processes of the cluster with this folder watch this one, until `hide`. Does nothing where they
    use pidfds."""
    if not has_pidfds():
        path = _pipe(folder, os.getpid())
        # Opened for writing alone, a pipe without readers would be refused.
        _shown[folder] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _held.add(_shown[folder])


def hide(folder: Path) -> None:
    """Undo `show`. The processes that watch this one see it end."""
    shown = _shown.pop(folder, None)
    if shown is not None:
        _held.discard(shown)
        os.close(shown)


def watch(pid: int, folder: Path) -> int:
    """Return a descriptor that can be read once the process with this pid has ended. The caller closes it.

    Args:
        pid: the process, which calls `show` with the same folder. Where there are no pidfds and it ends
            after this call but before that one, its end is not seen; a parent, which sees it, uses `fork`.
        folder: the cluster's folder.

    Raises:
        ProcessLookupError: there is no such process any more.
    """
    if has_pidfds():
        return os.pidfd_open(pid)
    try:
        descriptor = os.open(_pipe(folder, pid), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ProcessLookupError(f"the cluster of process {pid} has ended: {folder} is gone") from None
    try:
        # The pipe was opened first. If the process is there now, its end will be seen.
        ProcessId.of(pid)
    except ProcessLookupError:
        os.close(descriptor)
        raise
    return descriptor


def fork() -> tuple[int, int]:
    """Fork this process.

    Returns:
        In the parent the child's pid, and a descriptor that can be read once the child has ended. In the
        child 0 and -1.
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
    """Return the wait status of a child whose descriptor from `fork` can be read."""
    if not has_pidfds():
        # Code in the child may have closed the pipe, and nothing could watch the child any more. The status
        # of a child that is ending does not change by this.
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _pipe(folder: Path, pid: int) -> Path:
    """The named pipe of a process, made by whoever needs it first."""
    path = folder / f"alive-{pid}"
    with suppress(FileExistsError):
        os.mkfifo(path, mode=0o600)
    return path


def _close_in_child() -> None:
    """Close the pipes in a forked child, which may outlive its parent."""
    for descriptor in _held:
        with suppress(OSError):  # code may have closed it
            os.close(descriptor)
    _held.clear()
    _shown.clear()


os.register_at_fork(after_in_child=_close_in_child)


class LifetimeWatch:
    """Watches the processes without which this one is of no use.

    Args:
        folder: the cluster's folder.
        owner: a descriptor of the process that started the cluster (`watch`). That process may end
            once the cluster is marked to be kept. The descriptor is opened while the owner certainly runs,
            because an engine may be forked long after, when the pid belongs to another process.
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
        """Whether this process is of no further use, now that these descriptors can be read."""
        if self._owner in ready and self._kept.exists():
            self.fds.discard(self._owner)
        return not self.fds.isdisjoint(ready)


def end_with(parent_pid: int) -> None:
    """Start a thread that ends this process as soon as its parent ends. End it at once if the parent has
    ended."""
    try:
        parent = os.pidfd_open(parent_pid) if has_pidfds() else None
    except ProcessLookupError:
        os._exit(1)
    # The pidfd was opened first, so that a process which gets the same pid later is not mistaken for the
    # parent.
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
