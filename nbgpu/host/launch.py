"""Launch the two processes with which every cluster on this host begins: the fork server and ipyparallel's
controller.

Neither depends on the number of ranks. They import their modules in parallel, while this process continues.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbgpu.machine import interpreter, processes, watched
from nbgpu.machine.files import write_whole
from nbgpu.machine.interfaces import LOOPBACK
from nbgpu.machine.processes import ProcessId
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.cluster_processes import CLUSTER_FOLDER, CONTROLLER_PID, HOST_FOLDER

CLUSTER_ID = "nbgpu"
"""ipyparallel's cluster id, the same for all clusters, because each has its own folder."""
REQUESTS_SOCKET = "nursery.sock"
"""The socket in the cluster's folder on which the fork server takes requests."""

_HEARTBEAT_PERIOD_MS = 100
"""ipyparallel registers an engine after its first heartbeat, so that its default of 3 s would delay every
start."""
_MAX_MISSES = 100
"""A host without a heartbeat for 10 s is given up. By then it has ended itself: its lease expires after 6 s
(engine/process/host.py), and its ranks end within a second."""
_NO_LIMIT_S = 3600
_CONTROLLER_OPTIONS = (
    f"--HeartMonitor.max_heartmonitor_misses={_MAX_MISSES}",
    f"--HeartMonitor.period={_HEARTBEAT_PERIOD_MS}",
    "--IPController.enable_curve=True",
    # One process with threads starts in a third of the time of six processes.
    "--IPController.use_threads=True",
    "--IPController.broadcast_scheduler_depth=0",
    "--IPController.db_class=NoDB",
    # An engine that is stopped before its first heartbeat is waited for as long as its process lives.
    f"--IPController.registration_timeout={_NO_LIMIT_S}",
)
_LIMITS = sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class Launched:
    """The two processes and the cluster's folder, which only the user can enter."""

    folder: Path
    children: dict[str, subprocess.Popen[bytes]]
    """The two processes, by their names in messages."""

    def are_alive(self) -> bool:
        """Whether both processes run."""
        return all(child.poll() is None for child in self.children.values())

    def end(self) -> None:
        """End both processes and what they have started, and remove the folder."""
        alive = []
        for child in self.children.values():
            with suppress(ProcessLookupError):
                alive.append(ProcessId.of(child.pid))
        processes.end(alive)
        for child in self.children.values():
            child.wait()
        watched.hide(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def new_folder() -> Path:
    """Return the path of a new cluster's folder, which does not exist yet."""
    return Path(tempfile.gettempdir()) / f"nbgpu-{secrets.token_hex(6)}"


def launch(folder: Path, environment: Mapping[str, str], ip: str = "") -> Launched:
    """Start both processes in a new folder and return immediately.

    Args:
        folder: a path that does not exist yet. If this process is killed, one of the launched processes
            removes the folder.
        environment: environment variables of the engines, in addition to those of this process.
        ip: for ranks on other hosts, the address at which the controller listens for them; no fork server is
            started here then. Empty for ranks on this host.
    """
    folder.mkdir(mode=0o700)
    launched = Launched(folder, {})
    try:
        watched.show(folder)
        _start_both(launched, environment, ip)
    except BaseException:
        launched.end()
        raise
    return launched


def _start_both(launched: Launched, environment: Mapping[str, str], ip: str) -> None:
    """Start the fork server, unless the ranks are on other hosts, and then the controller, which watches the
    fork server by its pid."""
    folder = launched.folder
    variables = _prepared(folder, environment)
    parent = _fork_server(folder, variables) if not ip else None
    if parent is not None:
        launched.children["fork server"] = parent
    lives_with = (str(folder), str(os.getpid()), str(parent.pid if parent is not None else 0))
    command = interpreter.command(
        "nbgpu.client.engines.controller", *lives_with, f"--ip={ip or LOOPBACK}", *_CONTROLLER_OPTIONS
    )
    controller = _started(command, folder, "ipcontroller.log", variables)
    launched.children["controller"] = controller
    write_whole(folder / CONTROLLER_PID, str(controller.pid))


def launch_fork_server(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a fork server in a new folder and return immediately. On this host, which is not the notebook's,
    the present process takes the roles of the cluster's owner and of its controller.

    Args:
        folder: a path that does not exist yet.
        environment: environment variables of the engines, in addition to those of this process.
    """
    folder.mkdir(mode=0o700)
    variables = _prepared(folder, environment)
    write_whole(folder / CONTROLLER_PID, str(os.getpid()))
    watched.show(folder)
    return _fork_server(folder, variables | {HOST_FOLDER: folder.name})


def _prepared(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Create the folders that ipyparallel needs, and return the environment of the cluster's processes."""
    for part in ("profile", "profile/log"):
        (folder / part).mkdir(mode=0o700)
    return _variables(environment) | {
        "NBGPU_OWNER_PID": str(os.getpid()),
        CLUSTER_FOLDER: str(folder),
        "IPP_CLUSTER_ID": CLUSTER_ID,
        "IPP_PROFILE_DIR": str(folder / "profile"),
    }


def _fork_server(folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the fork server, which inherits a listening socket. Requests wait in the socket's queue until the
    fork server has imported its modules."""
    with socket.socket(socket.AF_UNIX) as requests:
        with short_path(folder) as short:
            requests.bind(str(short / REQUESTS_SOCKET))
        requests.listen()
        command = interpreter.command("nbgpu.engine.process.fork_server", str(requests.fileno()))
        return _started(command, folder, "ipengine.log", variables, requests.fileno())


def _started(
    command: Sequence[str], folder: Path, log: str, variables: Mapping[str, str], *kept: int
) -> subprocess.Popen[bytes]:
    """Start a process in a new session, so that it gets no signals from the terminal. It inherits the file
    descriptors `kept`."""
    with (folder / "profile" / "log" / log).open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=kept,
            start_new_session=True,
        )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **environment, "PYTHONFAULTHANDLER": "1"}


def surroundings(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return everything that a process launched now would inherit or read. A process that was launched in
    advance can be used if the result is still the same."""
    return (
        os.getpid(),
        interpreter.command(""),
        _variables(environment),
        Path("/proc/self/cwd").readlink(),
        tempfile.gettempdir(),
        [resource.getrlimit(limit) for limit in _LIMITS],
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        _umask(),
        [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        _installed(),
    )


def _umask() -> str:
    """Return the line with this process's umask. os.umask would change the umask to return it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("Umask:"))


def _installed() -> list[tuple[str, int]]:
    """Return the folders of installed packages, each with the time in ns at which a package in it was last
    added, removed or replaced."""
    folders = [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    return [(str(folder), folder.stat().st_mtime_ns) for folder in folders if folder.exists()]
