"""The process that makes a host part of a cluster: it connects to the controller, serves the client, and
ends.

    python -m nbgpu.engine.process.host JOIN_FILE [--remove-folder | --remove-folder-unless-signalled]

It launches the host's own fork server. It is an engine of ipyparallel itself, through which the client calls
the functions that only a process of this host can do to the ranks here (host_calls.py). It never runs a
person's code. Without a heartbeat of the controller for a few seconds this process ends, and the host's fork
server and ranks with it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from nbgpu.engine.process import host_calls
from nbgpu.errors import ClusterError
from nbgpu.host import launch
from nbgpu.host.this_host import ThisHost
from nbgpu.machine import interfaces, processes
from nbgpu.machine.files import write_whole
from nbgpu.machine.processes import ProcessId
from nbgpu.protocol.cluster_processes import engine_name
from nbgpu.protocol.hosts import JoinFile, new_number
from nbgpu.protocol.meeting import MEETING

_REACH_PATIENCE_S = 10.0
_NO_LIMIT_S = 3600
_LEASE_MISSES = 10
"""ipyparallel checks the heartbeat every 0.6 s: the host ends 6 s after the last one of the controller, which
gives the host up after 10 s (host/launch.py)."""
_FAREWELL_S = 0.05
"""The time for the hub to get a message before this process ends."""

_here: ThisHost
_folder: Path
_fork_server: subprocess.Popen[bytes]
_shutdown_lock = threading.Lock()
"""Taken by the first call of `_shut_down`, and never released."""
_shutdown_thread: threading.Thread | None = None
_to_remove: list[Path] = []
"""The folder that a launcher has made for the join file and the log of this process."""
_stays_when_signalled = False
"""Whether that folder stays when a signal ends this process, because Slurm may start the job once more."""


def main() -> None:
    """Connect to the cluster's controller, launch the fork server of this host, and serve until the cluster
    has ended."""
    global _here, _folder, _fork_server, _stays_when_signalled
    # Read the join file, and find a way to the controller.
    file = Path(sys.argv.pop(1)).absolute()
    join = _join_file(file)
    if sys.argv[1:] in (["--remove-folder"], ["--remove-folder-unless-signalled"]):
        _stays_when_signalled = sys.argv.pop(1) != "--remove-folder"
        _to_remove.append(file.parent)
    try:
        address = _reach(join)
    except SystemExit:
        if "SLURM_RESTART_COUNT" in os.environ:
            # The notebook has ended while its job waited to start again, and nobody reads the log.
            _remove_folders(_to_remove)
        raise
    if join.working_folder:
        with suppress(OSError):  # a host need not have it, and a person may have chosen another
            os.chdir(join.working_folder)
    # Begin this host's part of the cluster.
    _folder = launch.new_folder()
    _here = ThisHost(_folder, from_start=True)
    _fork_server = launch.launch_fork_server(_folder, join.environment)
    write_whole(_folder / MEETING, json.dumps(dict(join.meeting)), mode=0o600)
    _here.begin_engines(0)
    host_calls.serve(_here, _folder, address)
    # Answer the client until a signal, the fork server's end or the controller's silence ends this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_on_signal)
    threading.Thread(target=_end_with_fork_server, name="nbgpu-lifetime", daemon=True).start()
    try:
        _serve(join)
    finally:
        # ipyparallel's loop ends when the lease does.
        host_calls.say(
            "the cluster's controller is not heard any more: it has ended, or is cut off. The ranks here end"
        )
        _shut_down()


def _join_file(file: Path) -> JoinFile:
    """Read the join file, which has the controller's addresses and keys; exit with a message if it cannot be
    read."""
    try:
        return JoinFile.read(file)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(
            f"{platform.node()}: {file} is not a join file of this version of nbgpu ({error}). The start of a cluster with "
            "launcher='hosts' writes one, and names it"
        )


def _reach(join: JoinFile) -> tuple[str, str]:
    """Find the network interface and the address through which this host reaches the controller, and try to
    connect; exit with a message if that fails."""
    connection = join.engine_connection
    url = urlsplit(f"{connection['interface']}:{connection['registration']}")
    assert url.hostname is not None
    assert url.port is not None
    name, address = interfaces.towards(url.hostname, url.port)
    try:
        socket.create_connection((url.hostname, url.port), timeout=_REACH_PATIENCE_S).close()
    except OSError as error:
        sys.exit(
            f"{platform.node()}: the cluster's controller does not answer at {url.hostname}:{url.port}, interface "
            f"{join.interface} of the notebook's host ({error}). This host would reach it from {address}, interface "
            f"{name}. Start the cluster with interface= set to an interface that both hosts share"
        )
    host_calls.say(f"dials in to the cluster at {url.hostname}:{url.port} from {address}, interface {name}")
    return name, address


def _serve(join: JoinFile) -> None:
    """Run ipyparallel's engine of this host in this process, until the controller's heartbeat fails."""
    from ipyparallel.engine.app import IPEngine

    security = _folder / "profile" / "security"
    security.mkdir(mode=0o700)
    write_whole(
        security / f"ipcontroller-{launch.CLUSTER_ID}-engine.json",
        json.dumps(dict(join.engine_connection)),
        mode=0o600,
    )
    os.environ |= {"IPP_CLUSTER_ID": launch.CLUSTER_ID, "IPP_PROFILE_DIR": str(_folder / "profile")}

    class HostEngine(IPEngine):  # type: ignore[misc]
        """An engine that stays in the present folder, and keeps the signal handlers of this module."""

        def init_signal(self) -> None:
            """Leave the signals as they are."""

        def to_work_dir(self) -> None:
            """Stay in the present folder."""

    HostEngine.launch_instance(
        argv=[
            "--IPEngine.enable_nanny=False",
            f"--IPEngine.id={new_number()}",
            # Its warnings are about intended settings, such as messages that Curve protects and no signature.
            "--IPEngine.log_level=40",
            f"--IPEngine.timeout={_NO_LIMIT_S}",
            f"--IPEngine.wait_for_url_file={_NO_LIMIT_S}",
            f"--IPEngine.max_heartbeat_misses={_LEASE_MISSES}",
            f"--Session.session={engine_name(os.getpid(), _folder.name)}",
        ]
    )


def _end_with_fork_server() -> None:
    """Wait for the fork server's end, and end this host's part of the cluster with it."""
    code = _fork_server.wait()
    if _shutdown_lock.locked():
        return
    host_calls.say(
        f"the process that forks the ranks has ended with {code}, and so does this host's part of the cluster. "
        f"{_here.log_tail()}"
    )
    # The launcher that has started this host reads the log, and removes the log.
    _shut_down(keeps_log=True)


def _end_on_signal(number: int, _: FrameType | None) -> None:
    """End this host's part of the cluster because of a signal, after a line about the signal in the log."""
    host_calls.say(f"{signal.Signals(number).name} ends this host's part of the cluster")
    _shut_down(keeps_log=_stays_when_signalled, unregisters=True)


def _shut_down(keeps_log: bool = False, unregisters: bool = False) -> None:
    """End the fork server and the ranks, remove their folders, and end this process.

    The first call does this work. Another thread that calls meanwhile waits for the end of the process; a
    signal handler that interrupts the first call on its own thread returns, so that the work goes on.

    Args:
        keeps_log: leave the launcher's folder with this process's log in place.
        unregisters: unregister the ranks and this host at the hub.
    """
    global _shutdown_thread
    if not _shutdown_lock.acquire(blocking=False):
        if _shutdown_thread is not threading.current_thread():
            threading.Event().wait()  # until this process ends
        return
    _shutdown_thread = threading.current_thread()
    # The fork server and the ranks would end by themselves. But where this process is a task of Slurm, they
    # are killed with it, and no process would remove the folder.
    with suppress(ProcessLookupError, ClusterError):
        processes.end([ProcessId.of(_fork_server.pid)])
    if unregisters:
        _unregister_all()
    _remove_folders([_folder, *([] if keeps_log else _to_remove)])
    # An ordinary exit would wait for ipyparallel's threads.
    os._exit(0)


def _remove_folders(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _unregister_all() -> None:
    """Unregister the ranks of this host, and the host itself, at ipyparallel's hub: the client waits for
    engines until the hub reports their end."""
    from ipyparallel.engine.app import IPEngine

    if IPEngine.initialized() and IPEngine.instance().id is not None:
        for number in (*host_calls.forked, IPEngine.instance().id):
            host_calls.unregister(number)
        time.sleep(_FAREWELL_S)


def end_soon() -> None:
    """End this host's part of the cluster, on a thread, so that the client's call is answered first."""
    host_calls.say("the cluster was stopped")
    threading.Thread(target=_unregister_and_end, name="nbgpu-end", daemon=True).start()


def _unregister_and_end() -> None:
    """Unregister this host at the hub a moment after the call is answered, and end it."""
    from ipyparallel.engine.app import IPEngine

    # ipyparallel's client prints an answer that comes after the hub's message about the end.
    time.sleep(host_calls.OBITUARY_PATIENCE_S)
    # The notebook waits until this host is gone from its list.
    host_calls.unregister(IPEngine.instance().id)
    time.sleep(_FAREWELL_S)
    _shut_down()


if __name__ == "__main__":
    # The client's calls find this module under its name.
    import_module("nbgpu.engine.process.host").main()
