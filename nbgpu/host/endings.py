"""The exit statuses of engines on this host, and the ends of the logs of a cluster's processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from nbgpu.machine import processes

_OBITUARY_PATIENCE_S = 0.2
"""The longest wait until the fork server has recorded the exit code of an engine that has ended."""
_VMSTAT = Path("/proc/vmstat")
_OOM_KILL_AGE_S = 10.0
"""An OOM kill that is older than this cannot be the end of an engine that has just been alive."""

Whose = Literal["engines", "controller"]
_NUM_LINES = 20
"""The number of lines of each log in an error message."""


class ExitStatus(NamedTuple):
    """The exit status of a process."""

    code: int | None
    """The exit code, which is negative for a signal; None if it is not known."""
    killer: str = ""
    """For SIGKILL: the probable sender, as text that follows the signal's name in a sentence."""


class Endings:
    """Determines how engines ended, and for SIGKILL whether the kernel's OOM killer has probably sent it.

    Args:
        folder: the cluster's folder on this host, in which the fork server records exit codes.
        from_start: whether the cluster begins now. For a cluster that another process has started, the number
            of earlier kills by the OOM killer is not known.
    """

    def __init__(self, folder: Path, from_start: bool) -> None:
        self._folder = folder
        self._num_oom_kills = _num_oom_kills() if from_start else None
        """The kernel's number of OOM kills, at least `_OOM_KILL_AGE_S` ago; None if it is not known. An OOM
        kill since then explains the end of one engine, after which this number is increased by one."""
        self._next_num_oom_kills = self._num_oom_kills
        """The newer number that replaces `_num_oom_kills` when it is old enough."""
        self._next_count_mono_s = time.monotonic() + _OOM_KILL_AGE_S
        self._guesses: dict[int, str] = {}
        """The guess at the sender of SIGKILL, by the pid of the process that it ended."""

    def of(self, pid: int) -> ExitStatus | None:
        """Return the exit status of an engine; None while it lives."""
        if not processes.is_ending(pid):
            self._count_oom_kills()
            return None
        code = self._exit_code(pid)
        if code is None:
            if psutil.pid_exists(pid):
                return None  # the process is still exiting
            # The process may have ended just now, and its parent has recorded the code in the meantime.
            code = self._exit_code(pid)
        return ExitStatus(code, self._guess_of_killer(pid) if code == -signal.SIGKILL else "")

    def _count_oom_kills(self) -> None:
        """Update the number of OOM kills every `_OOM_KILL_AGE_S` while engines live, because older kills were
        of other processes."""
        if time.monotonic() > self._next_count_mono_s:
            self._num_oom_kills, self._next_num_oom_kills = self._next_num_oom_kills, _num_oom_kills()
            self._next_count_mono_s = time.monotonic() + _OOM_KILL_AGE_S

    def _guess_of_killer(self, pid: int) -> str:
        """Return whether the kernel's OOM killer probably ended a process, by the number of OOM kills in the
        last seconds."""
        if pid not in self._guesses:
            before, now = self._num_oom_kills, _num_oom_kills()
            if before is None or now is None:
                guess = "; the kernel's OOM killer?"
            elif now > before:
                guess = ", most likely by the kernel's OOM killer, which has just ended a process"
                self._num_oom_kills = before + 1
            else:
                guess = ", and not by the kernel's OOM killer"
            self._guesses[pid] = guess
        return self._guesses[pid]

    def _exit_code(self, pid: int) -> int | None:
        """Return the exit code of an engine; None if it has not ended, or if the code is not known."""
        record = self._folder / f"ended-{pid}"
        give_up_s = time.monotonic() + _OBITUARY_PATIENCE_S
        # Until the fork server reaps an engine, the kernel has its status; the server may be busy with an
        # import. Only between that and the writing of the record is there neither.
        while (status := processes.wait_status(pid)) is None and not record.exists():
            if psutil.pid_exists(pid) or time.monotonic() > give_up_s:
                return None
            time.sleep(0.005)
        return int(record.read_text()) if status is None else os.waitstatus_to_exitcode(status)


def _num_oom_kills() -> int | None:
    """Return the number of OOM kills since the boot; None if the kernel does not report it."""
    try:
        counts = dict(line.split() for line in _VMSTAT.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def log_tail(folder: Path, whose: Whose = "engines") -> str:
    """Return the last lines of the log of the engines or the controller, for an error message."""
    pattern = "ipengine*.log" if whose == "engines" else "ipcontroller*.log"
    logs = sorted((folder / "profile" / "log").glob(pattern))
    lines = (line for log in logs for line in log.read_text(errors="replace").splitlines()[-_NUM_LINES:])
    text = "\n".join(lines)
    return f"The log of the {whose} ends with:\n{text}" if text else f"The log of the {whose} is empty."
