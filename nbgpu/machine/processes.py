"""Processes identified by pid and start time, because a pid alone may belong to another process by now."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from nbgpu.errors import ClusterError

_TERM_PATIENCE_S = 2.0
"""The time between SIGTERM and SIGKILL."""
_KILL_PATIENCE_S = 5.0
"""The time after SIGKILL in which a process has to be gone. One that hangs in a driver may stay."""
_POLL_S = 0.01
_STAT_BYTES = 4096
"""More than the line in /proc/PID/stat can have."""
_ENDED = "ZX"
"""The states of a process that has ended and still has its pid and exit status."""
_STOPPED, _TRACED, _UNINTERRUPTIBLE = "T", "t", "D"
_CGROUPS = "/sys/fs/cgroup"
_EXITING, _SIGNALED = 0x4, 0x400
"""PF_EXITING and PF_SIGNALED of the kernel's include/linux/sched.h."""
_NUM_FIELDS_TO_FLAGS = 7
"""The number of fields of /proc/PID/stat from the state (the third) up to the flags (the ninth)."""

_StatBuffer = ctypes.c_char * _STAT_BYTES

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64]


@functools.cache
def has_pidfds() -> bool:
    """Whether pidfds can be used. They are missing on a kernel before Linux 5.3, where a container's filter
    refuses unknown system calls, and in a Python that was built for an older kernel."""
    try:
        own = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        signal.pidfd_send_signal(own, 0)
    except (AttributeError, OSError):
        return False
    finally:
        os.close(own)
    return True


class ProcessId(NamedTuple):
    """A process of this host, valid until the next boot."""

    pid: int
    started_ticks: int
    """Clock ticks from the host's boot to the start of the process. psutil gives the time of day of the
    start, which it derives from a clock that may be set; this number does not change."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has this pid now; ProcessLookupError if there is none."""
        state, *fields = _stat(pid)
        if state in _ENDED:
            raise ProcessLookupError(f"process {pid} has ended")
        # This is field 22 of /proc/PID/stat, the start in clock ticks since the boot.
        return cls(pid, int(fields[18]))

    def alive(self) -> bool:
        """Whether the process with this pid and start time runs; a zombie counts as ended."""
        try:
            return self.of(self.pid) == self
        except ProcessLookupError:
            return False

    def send(self, signal_number: int) -> None:
        """Send a signal to this process, and never to another one that got its pid. Nothing happens if it has
        ended."""
        if not has_pidfds():
            with suppress(ProcessLookupError):
                # In the moment between the two the process may end, and another one get its pid.
                if self.alive():
                    os.kill(self.pid, signal_number)
            return
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor refers to whatever process has the pid now. It is used only if that is this one.
            if self.alive():
                signal.pidfd_send_signal(fd, signal_number)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)


class EngineProcess(NamedTuple):
    """A process of a cluster. Hosts may give the same pid at the same time."""

    host: str
    """The host's name, unique in the cluster."""
    pid: int


def is_ending(pid: int) -> bool:
    """Whether a process is exiting or has ended. Exiting takes a while on a busy host, and for a large
    process."""
    try:
        return _says_ending(_stat(pid))
    except ProcessLookupError:
        return True


class ProcessExitProbe:
    """Tells repeatedly whether one process is exiting, in a third of the time that the function `is_ending`
    takes. Every rank is checked before each cell, and with the function that took as long as to send the
    cell."""

    def __init__(self, pid: int) -> None:
        self._file: int | None = None
        with suppress(FileNotFoundError):  # it is gone
            # The file of the main thread, because for the whole process the kernel adds up all threads.
            self._file = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY)

    def is_ending(self) -> bool:
        """Whether the process that had the pid when this object was made is exiting or has ended."""
        if self._file is None:
            return True
        try:
            return _says_ending(_fields(_pread(self._file), num=_NUM_FIELDS_TO_FLAGS))
        except ProcessLookupError:
            return True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _pread(file: int) -> bytes:
    """Read a file from its beginning with the GIL held, which os.pread would release. The call takes 5 us,
    and the thread that sends a kernel's output would keep the caller waiting for the GIL for twenty times as
    long."""
    buffer = _StatBuffer()
    num = _libc.pread(file, buffer, _STAT_BYTES, 0)
    if num < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return ctypes.string_at(buffer, num)


def _says_ending(fields: list[str]) -> bool:
    return fields[0] in _ENDED or bool(int(fields[_NUM_FIELDS_TO_FLAGS - 1]) & (_EXITING | _SIGNALED))


def standstill(pid: int) -> str:
    """Return why something outside of a living process keeps it from running, and how to let it go on; empty
    if nothing does."""
    state = _state(pid)
    if state == _STOPPED:
        return f"its process is stopped (SIGSTOP; a debugger?). kill -CONT {pid} lets it go on"
    if state == _TRACED:
        return f"its process is held by {_tracer(pid)}. It goes on when that lets it"
    if group := _frozen_group(pid):
        return f"its process is frozen with its control group {group}. It goes on when that is thawed"
    return ""


def waits_in_the_system(pid: int) -> bool:
    """Whether the main thread of a process is in an uninterruptible wait of the kernel (state D), such as for
    a disk."""
    return _state(pid) == _UNINTERRUPTIBLE


def _state(pid: int) -> str:
    """The letter of a process's state (man 5 proc_pid_stat); empty where there is no such process."""
    try:
        return _stat(pid)[0]
    except ProcessLookupError:
        return ""


def _tracer(pid: int) -> str:
    """The process that traces another one, in words."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        tracer = status.partition("TracerPid:")[2].split()[0]
        name = Path(f"/proc/{tracer}/comm").read_text().strip()
        return f"a debugger ({name}, process {tracer})"
    return "a debugger"


def _frozen_group(pid: int) -> str:
    """The control group of a process, if the group is frozen (cgroups(7)); else empty."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            with suppress(OSError):  # the group cannot be seen from inside the container
                if not controllers and "frozen 1" in Path(f"{_CGROUPS}{path}/cgroup.events").read_text():
                    return path
                if controllers == "freezer":
                    state = Path(f"{_CGROUPS}/freezer{path}/freezer.state").read_text()
                    if not state.startswith("THAWED"):
                        return path
    return ""


def wait_status(pid: int) -> int | None:
    """Return the wait status of a process that has ended and whose parent, which is busy, has not called
    waitpid yet; None for any other process."""
    try:
        fields = _stat(pid)
    except ProcessLookupError:
        return None
    # This is field 52 of /proc/PID/stat, the exit status in the form that waitpid returns.
    return int(fields[49]) if fields[0] in _ENDED else None


def interrupt_programs_of(pid: int) -> None:
    """Send SIGINT to the programs that a process has started, as a terminal would. Copies of the process
    itself, such as data workers, get none, nor do detached programs, which became its children when their own
    parents ended."""
    with suppress(OSError):  # the process, or one of its children, has ended
        own_program = Path(f"/proc/{pid}/exe").readlink()
        for child in _children(pid):
            is_detached = os.getsid(child) not in (child, os.getsid(pid))
            if not is_detached and Path(f"/proc/{child}/exe").readlink() != own_program:
                _interrupt_tree(child)


def _interrupt_tree(pid: int) -> None:
    """Send SIGINT to a process and its descendants. The children are listed first, because a process that
    ends gives them to another parent."""
    with suppress(OSError):
        children = list(_children(pid))
        os.kill(pid, signal.SIGINT)
        for child in children:
            _interrupt_tree(child)


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


def has_open(pid: int, beginning: str) -> bool:
    """Whether a process has a file open whose path begins like this. False also if this user may not see its
    files."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for link in links:
        with suppress(OSError):  # the file was closed in the meantime
            if str(link.readlink()).startswith(beginning):
                return True
    return False


def resident_bytes(pid: int) -> int | None:
    """The memory that a process has in RAM; None where it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return None


class CoreUse(NamedTuple):
    """The CPU time of all running threads of a process, in seconds, and how long they have waited for a
    core."""

    had_s: float
    waited_s: float
    """The time for which threads were ready to run and had no core. Threads that waited side by side are
    added up."""


def core_use(pid: int) -> CoreUse | None:
    """The use of cores as the Linux kernel counts it (schedstat in its docs); None where the process has
    ended."""
    had_ns = waited_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                had, waited, _ = (task / "schedstat").read_text().split()
                had_ns, waited_ns = had_ns + int(had), waited_ns + int(waited)
    except OSError:
        return None
    return CoreUse(had_ns / 1e9, waited_ns / 1e9)


def main_thread_core_use(pid: int | None = None) -> CoreUse | None:
    """Return the CPU time of the main thread of a process, by default of this one, and how long it has waited
    for a core; None if the kernel does not count this, or the process has ended."""
    try:
        had, waited, _ = Path(f"/proc/{pid or 'self'}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return CoreUse(int(had) / 1e9, int(waited) / 1e9)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (man 5 proc_pid_stat).

    Raises:
        ProcessLookupError: there is no such process that this user may see.
        OSError: the file cannot be read for another reason, such as too many open files in this process.
    """
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            return _fields(os.read(file, _STAT_BYTES))
        finally:
            os.close(file)
    # Where /proc is mounted with hidepid=1, other users' files are refused.
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        raise ProcessLookupError(f"there is no process {pid}") from None


def _fields(stat: bytes, num: int = -1) -> list[str]:
    """All fields from the third on; with `num`, at least so many of them as separate fields."""
    # The second field is the program's name in brackets, and may itself contain blanks and brackets.
    return stat[stat.rindex(b")") + 1 :].decode().split(maxsplit=num)


def end(leaders: Iterable[ProcessId], others: Iterable[ProcessId] = ()) -> list[ProcessId]:
    """End processes, all members of the leaders' process groups, and all descendants of these. The leaders
    get SIGTERM first; what remains gets SIGKILL.

    Returns:
        The processes that were alive.

    Raises:
        ClusterError: a process survives SIGKILL, as one that hangs in a driver does.
    """
    leading = list(leaders)
    groups = {process.pid for process in leading}
    ended = left = _with_their_families([*leading, *others], groups)
    for process in leading:
        process.send(signal.SIGTERM)
    left = _wait(left, _TERM_PATIENCE_S)
    if left:
        # They may have started others since the first look.
        left = _with_their_families(left, groups)
        for process in left:
            process.send(signal.SIGKILL)
        left = _wait(left, _KILL_PATIENCE_S)
    if left:
        named = ", ".join(str(p.pid) for p in sorted(left))
        raise ClusterError(
            f"process(es) {named} did not end when they were killed, as happens in a driver that hangs. They end with "
            "what they wait for, or with the machine: `nbgpu stop` tries again"
        )
    return sorted(ended)


def _with_their_families(known: Iterable[ProcessId], groups: set[int]) -> set[ProcessId]:
    """Return the living processes among `known`, the members of their groups, and the descendants of all
    these.

    The number of a group is the pid of its leader, and may have been given to another group by now. As long
    as one of the members is known to be ours, the group is ours.
    """
    found = {process for process in known if process.alive()}
    if not found:
        return found
    ours = {group for process in found if (group := _group_of(process.pid)) in groups}
    children_of: dict[int, list[int]] = {}
    pids = {process.pid for process in found}
    for pid in psutil.pids():
        if _group_of(pid) in ours:
            pids.add(pid)
        with suppress(ProcessLookupError):
            children_of.setdefault(int(_stat(pid)[1]), []).append(pid)
    unvisited = list(pids)
    while unvisited:
        children = children_of.get(unvisited.pop(), [])
        unvisited += children
        pids.update(children)
    for pid in pids:
        with suppress(ProcessLookupError):
            found.add(ProcessId.of(pid))
    return found


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _wait(processes: Iterable[ProcessId], patience_s: float) -> set[ProcessId]:
    """Wait for processes to end; return those that still live."""
    give_up_s = time.monotonic() + patience_s
    while left := {process for process in processes if process.alive()}:
        if time.monotonic() > give_up_s:
            break
        time.sleep(_POLL_S)
    return left
