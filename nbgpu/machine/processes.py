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
"""An upper bound of the length of /proc/PID/stat."""
_ENDED = "ZX"
"""The states of a process that has ended and still has its pid and exit status: zombie and dead."""
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
    """Return whether pidfds can be used. They are missing before Linux 5.3, in containers whose seccomp
    filter refuses unknown system calls, and in a Python that was built for an older kernel."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except (AttributeError, OSError):
        return False
    finally:
        os.close(pidfd)
    return True


class ProcessId(NamedTuple):
    """A process of this host, valid until the next boot."""

    pid: int
    started_ticks: int
    """Clock ticks from the host's boot to the start of the process. psutil has the start as a time of day,
    which changes when the host's clock is set; this number does not change."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has this pid now; ProcessLookupError if there is none."""
        state, *fields = _stat(pid)
        if state in _ENDED:
            raise ProcessLookupError(f"process {pid} has ended")
        # Field 22 of /proc/PID/stat is the start in clock ticks since the boot; `fields` begins with field 4.
        return cls(pid, int(fields[22 - 4]))

    def alive(self) -> bool:
        """Return whether the process with this pid and start time runs; a zombie counts as ended."""
        try:
            return self.of(self.pid) == self
        except ProcessLookupError:
            return False

    def send(self, signal_number: int) -> None:
        """Send a signal to this process, and never to a later process with the same pid. Nothing happens if
        the process has ended."""
        if not has_pidfds():
            with suppress(ProcessLookupError):
                # Without pidfds the process may end between these two lines, and its pid be reused.
                if self.alive():
                    os.kill(self.pid, signal_number)
            return
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor refers to the process that has the pid now, which may be another one.
            if self.alive():
                signal.pidfd_send_signal(fd, signal_number)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)


class EngineProcess(NamedTuple):
    """A process of a cluster. A pid is unique only on its host."""

    host: str
    """The host's name, unique in the cluster."""
    pid: int


def is_ending(pid: int) -> bool:
    """Return whether a process is exiting or has ended. Exiting takes a while on a busy host, and for a large
    process."""
    try:
        return _is_ending_by_stat(_stat(pid))
    except ProcessLookupError:
        return True


class ProcessExitProbe:
    """Checks repeatedly whether one process is exiting, in a third of the time of the function `is_ending`.
    Every rank is checked before each cell, for which the function would take as long as to send the cell."""

    def __init__(self, pid: int) -> None:
        self._file: int | None = None
        with suppress(FileNotFoundError):  # the process has ended
            # The main thread's file is faster: for the file of the whole process the kernel adds up all
            # threads.
            self._file = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY)

    def is_ending(self) -> bool:
        """Return whether the process that had the pid at construction is exiting or has ended."""
        if self._file is None:
            return True
        try:
            return _is_ending_by_stat(_fields(_pread(self._file), num=_NUM_FIELDS_TO_FLAGS))
        except ProcessLookupError:
            return True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _pread(file: int) -> bytes:
    """Read a file from its beginning without releasing the GIL, as os.pread would. The call takes 5 us, and
    to get the GIL back from the thread that sends a kernel's output may take twenty times as long."""
    buffer = _StatBuffer()
    num_bytes = _libc.pread(file, buffer, _STAT_BYTES, 0)
    if num_bytes < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return ctypes.string_at(buffer, num_bytes)


def _is_ending_by_stat(fields: list[str]) -> bool:
    """Return whether a process is exiting or has ended, by its state and flags in /proc/PID/stat."""
    return fields[0] in _ENDED or bool(int(fields[_NUM_FIELDS_TO_FLAGS - 1]) & (_EXITING | _SIGNALED))


def standstill(pid: int) -> str:
    """Return a sentence if a living process is kept from running from outside (stopped, traced or frozen),
    with the way to continue it; else an empty text."""
    state = _state(pid)
    if state == _STOPPED:
        return f"its process is stopped (SIGSTOP; a debugger?). kill -CONT {pid} lets it go on"
    if state == _TRACED:
        return f"its process is held by {_tracer(pid)}. It goes on when that lets it"
    if group := _frozen_group(pid):
        return f"its process is frozen with its control group {group}. It goes on when that is thawed"
    return ""


def waits_in_the_system(pid: int) -> bool:
    """Return whether the main thread of a process is in an uninterruptible wait of the kernel (state D), such
    as for a disk."""
    return _state(pid) == _UNINTERRUPTIBLE


def _state(pid: int) -> str:
    """Return the letter of a process's state (man 5 proc_pid_stat); empty if there is no such process."""
    try:
        return _stat(pid)[0]
    except ProcessLookupError:
        return ""


def _tracer(pid: int) -> str:
    """Return a description of the process that traces another one with ptrace."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        tracer = status.partition("TracerPid:")[2].split()[0]
        name = Path(f"/proc/{tracer}/comm").read_text().strip()
        return f"a debugger ({name}, process {tracer})"
    return "a debugger"


def _frozen_group(pid: int) -> str:
    """Return the path of a process's control group if the group is frozen (cgroups(7)); else empty."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            with suppress(OSError):  # the group is not visible inside a container
                if not controllers and "frozen 1" in Path(f"{_CGROUPS}{path}/cgroup.events").read_text():
                    return path
                if controllers == "freezer":
                    state = Path(f"{_CGROUPS}/freezer{path}/freezer.state").read_text()
                    if not state.startswith("THAWED"):
                        return path
    return ""


def wait_status(pid: int) -> int | None:
    """Return the wait status of a zombie, whose parent has not called waitpid yet; None for any other
    process."""
    try:
        fields = _stat(pid)
    except ProcessLookupError:
        return None
    # Field 52 of /proc/PID/stat is the exit status as waitpid returns it; `fields` begins with field 3.
    return int(fields[52 - 3]) if fields[0] in _ENDED else None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as 'SIGKILL', or 'signal 35' for a real-time signal without one."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def interrupt_programs_of(pid: int) -> None:
    """Send SIGINT to the programs that a process has started, as a terminal would. Left out are forks of the
    process itself, such as data workers, and detached programs, which the process adopted when their parents
    ended."""
    with suppress(OSError):  # the process, or one of its children, has ended
        program = Path(f"/proc/{pid}/exe").readlink()
        for child in _children(pid):
            is_detached = os.getsid(child) not in (child, os.getsid(pid))
            if not is_detached and Path(f"/proc/{child}/exe").readlink() != program:
                _interrupt_tree(child)


def _interrupt_tree(pid: int) -> None:
    """Send SIGINT to a process and its descendants."""
    with suppress(OSError):
        # The children are listed before the signal, because those of an ended process get another parent.
        children = list(_children(pid))
        os.kill(pid, signal.SIGINT)
        for child in children:
            _interrupt_tree(child)


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


def has_open(pid: int, beginning: str) -> bool:
    """Return whether a process has a file open whose path starts with `beginning`. False also if this user
    may not see its files."""
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
    """Return the resident memory of a process; None if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return None


class CoreUse(NamedTuple):
    """The CPU time of a process's threads, and their time in the scheduler's run queue. The times of
    concurrent threads are added up."""

    had_s: float
    """The CPU time."""
    waited_s: float
    """The time for which threads were ready to run but had no core."""


def core_use(pid: int) -> CoreUse | None:
    """Return the CPU time and waiting time of all running threads of a process, from the kernel's schedstat;
    None if the process has ended."""
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
    """Return the CPU time and waiting time of the main thread of a process, by default of this one; None if
    the kernel has no schedstat, or the process has ended."""
    try:
        had, waited, _ = Path(f"/proc/{pid or 'self'}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return CoreUse(int(had) / 1e9, int(waited) / 1e9)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on (man 5 proc_pid_stat).

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
    """Split /proc/PID/stat into its fields from the third on; with `num`, only the first `num` are split."""
    # The second field is the program's name in brackets, which may itself contain blanks and brackets.
    return stat[stat.rindex(b")") + 1 :].decode().split(maxsplit=num)


def end(leaders: Iterable[ProcessId], others: Iterable[ProcessId] = ()) -> list[ProcessId]:
    """End processes, all members of the leaders' process groups, and all descendants of these. The leaders
    get SIGTERM; processes that remain get SIGKILL.

    Args:
        leaders: leaders of process groups.
        others: further processes.

    Returns:
        The processes that were alive.

    Raises:
        ClusterError: a process survives SIGKILL, because it hangs in a driver.
    """
    leaders = list(leaders)
    groups = {process.pid for process in leaders}
    ended = _with_groups_and_descendants([*leaders, *others], groups)
    for process in leaders:
        process.send(signal.SIGTERM)
    left = _wait(ended, _TERM_PATIENCE_S)
    if left:
        # They may have started others in the meantime.
        left = _with_groups_and_descendants(left, groups)
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


def _with_groups_and_descendants(processes: Iterable[ProcessId], groups: set[int]) -> set[ProcessId]:
    """Return the living processes among the given ones, the members of their process groups, and the
    descendants of all these.

    Args:
        processes: the given processes.
        groups: the process groups to include. The id of a group is the pid of its leader, which may have been
            reused since; a group is included only if one of the given processes is still in it.
    """
    alive = {process for process in processes if process.alive()}
    if not alive:
        return alive
    living_groups = {group for process in alive if (group := _group_of(process.pid)) in groups}
    children_of: dict[int, list[int]] = {}
    pids = {process.pid for process in alive}
    for pid in psutil.pids():
        if _group_of(pid) in living_groups:
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
            alive.add(ProcessId.of(pid))
    return alive


def _group_of(pid: int) -> int | None:
    """Return the process group of a process; None if the process has ended."""
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
