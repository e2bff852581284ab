"""A host of a cluster: the process that dials in from there, and what the client asks of it.

    python -m nbgpu.engine.process.host JOIN_FILE [--remove-folder]

It launches the host's own fork server and is an engine of ipyparallel itself, through which the client does
all that only a process of this host can do to the ranks there. It never runs a person's code. When the
controller is not heard for a few seconds, the host ends, and its fork server and ranks with it.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nbgpu.errors import ClusterError, NbgpuError
from nbgpu.host import host_checks, launch, versions
from nbgpu.host.stacks import Stacks
from nbgpu.host.this_host import ThisHost
from nbgpu.machine import devices, interfaces, processes, watched
from nbgpu.machine.files import write_whole
from nbgpu.machine.processes import ProcessId
from nbgpu.protocol.hosts import HostDescription, JoinFile, new_number
from nbgpu.protocol.meeting import MEETING
from nbgpu.protocol.records import Device, MainThreadState, engine_name

_REACH_PATIENCE_S = 10.0
_NO_LIMIT_S = 3600
_LEASE_MISSES = 10
"""ipyparallel looks every 0.6 s: the host ends 6 s after the last sign of the controller, which gives the
host up after 10 s (host/launch.py)."""
_OBITUARY_PATIENCE_S = 0.15
_FAREWELL_S = 0.05

_here: ThisHost
_folder: Path
_fork_server: subprocess.Popen[bytes]
_address: tuple[str, str]
_stacks: Stacks | None = None
_leaving = threading.Lock()
_leaver: threading.Thread | None = None
_forked: set[int] = set()
"""The numbers of the engines of ranks here, also of those that have ended."""
_to_remove: list[Path] = []
"""The folder that a launcher has made for the join file and the log of this process."""


def main() -> None:
    """Dial in, and serve until the cluster is over."""
    global _here, _folder, _fork_server, _address
    file = Path(sys.argv.pop(1))
    join = _join_file(file)
    if sys.argv[1:] == ["--remove-folder"]:
        _to_remove.append(file.parent)
        sys.argv.pop(1)
    _address = _reach(join)
    _folder = launch.new_folder()
    _here = ThisHost(_folder, from_start=True)
    _fork_server = launch.launch_fork_server(_folder, join.environment)
    write_whole(_folder / MEETING, json.dumps(dict(join.meeting)), mode=0o600)
    _here.begin_engines(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _end_by(signal.Signals(number)))
    threading.Thread(target=_end_with_fork_server, name="nbgpu-lifetime", daemon=True).start()
    try:
        _serve(join)
    finally:
        # ipyparallel's loop ends when the lease does.
        _say(
            "the cluster's controller is not heard any more: it has ended, or is cut off. The ranks here end"
        )
        end()


def _join_file(file: Path) -> JoinFile:
    try:
        return JoinFile.read(file)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(
            f"{platform.node()}: {file} is not a join file of this version of nbgpu ({error}). The start of a cluster with "
            "launcher='hosts' writes one, and names it"
        )


def _reach(join: JoinFile) -> tuple[str, str]:
    """Return the interface, and its address, through which this host reaches the controller; exit with a
    message if it does not."""
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
    _say(f"dials in to the cluster at {url.hostname}:{url.port} from {address}, interface {name}")
    return name, address


def _serve(join: JoinFile) -> None:
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
        """An engine that stays in its folder and ends by SIGTERM as this module says."""

        def init_signal(self) -> None:
            """Leave the signals as they are."""

        def to_work_dir(self) -> None:
            """Stay in this folder."""

    HostEngine.launch_instance(
        argv=[
            "--IPEngine.enable_nanny=False",
            f"--IPEngine.id={new_number()}",
            # Its warnings are of things that are meant to be so, such as messages that Curve protects and no
            # signature.
            "--IPEngine.log_level=40",
            f"--IPEngine.timeout={_NO_LIMIT_S}",
            f"--IPEngine.wait_for_url_file={_NO_LIMIT_S}",
            f"--IPEngine.max_heartbeat_misses={_LEASE_MISSES}",
            f"--Session.session={engine_name(os.getpid(), _folder.name)}",
        ]
    )


def _say(words: str) -> None:
    """Write a line for whoever started this host. ipykernel sends what is printed elsewhere."""
    print(f"{platform.node()}: {words}", file=sys.__stderr__, flush=True)


def _end_with_fork_server() -> None:
    code = _fork_server.wait()
    if _leaving.locked():
        return
    _say(
        f"the process that forks the ranks has ended with {code}, and so does this host's part of the cluster. "
        f"{_here.log_tail()}"
    )
    # Whoever has started this host reads its log, and removes it.
    _leave(keeps_log=True)


def _end_by(number: signal.Signals) -> None:
    _say(f"{number.name} ends this host's part of the cluster")
    _leave(tells=True)


def end() -> None:
    """End this host's part of the cluster, and this process."""
    _leave()


def _leave(keeps_log: bool = False, tells: bool = False) -> None:
    """End the fork server and the ranks, remove what was made for them, and end this process. Returns only
    within another call on the same thread, which goes on."""
    global _leaver
    if not _leaving.acquire(blocking=False):
        if _leaver is not threading.current_thread():
            threading.Event().wait()  # until this process ends
        return
    _leaver = threading.current_thread()
    # They would end by themselves. Where this process is a task of Slurm's, though, they are killed with it,
    # and nobody would remove the folder.
    with suppress(ProcessLookupError, ClusterError):
        processes.end([ProcessId.of(_fork_server.pid)])
    if tells:
        _tell_all()
    for folder in (_folder, *([] if keeps_log else _to_remove)):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _tell_all() -> None:
    """Tell the hub that the ranks of this host have ended, and so does this host: else it waits for them."""
    from ipyparallel.engine.app import IPEngine

    if IPEngine.initialized() and IPEngine.instance().id is not None:
        for number in (*_forked, IPEngine.instance().id):
            _unregister(number)
        time.sleep(_FAREWELL_S)


# --- what the client asks, on this host's engine


def end_soon() -> None:
    """End this host's part of the cluster once this is answered."""
    _say("the cluster was stopped")
    threading.Thread(target=_tell_and_end, name="nbgpu-end", daemon=True).start()


def _tell_and_end() -> None:
    from ipyparallel.engine.app import IPEngine

    # ipyparallel's client prints an answer that comes after the news of the end.
    time.sleep(_OBITUARY_PATIENCE_S)
    # The notebook waits until this host is gone from its list.
    _unregister(IPEngine.instance().id)
    time.sleep(_FAREWELL_S)
    end()


def describe(gpus: str, ranks: int | None, backends: Sequence[str]) -> dict[str, Any]:
    """Say what this host is and has.

    Args:
        gpus: the setting of the cluster, for this host.
        ranks: the number of ranks here; None for one on each GPU.
        backends: those over which the ranks may communicate.
    """
    chosen: Sequence[Device] = ()
    problem = ""
    try:
        chosen = devices.choose(gpus, ranks)
        host_checks.require_startable(os.environ, backends, len(chosen))
    except NbgpuError as error:
        problem = str(error)
    return asdict(
        HostDescription(
            platform.node(),
            *_address,
            str(_folder),
            str(_folder / MEETING),
            versions.here(),
            len(os.sched_getaffinity(0)),
            tuple(asdict(device) for device in chosen),
            problem,
        )
    )


def content_of(file: str) -> str | None:
    """The text of a small file as this host sees it; None if it sees none."""
    try:
        return Path(file).read_text()
    except OSError:
        return None


def fork(numbers: Sequence[int]) -> dict[int, int]:
    """Fork engines with these numbers; return their pids by number."""
    pids: dict[int, int] = {}
    _say(f"{len(numbers)} rank(s) start here")
    for number in numbers:
        _here.fork_engine(lambda pid, engine: pids.__setitem__(engine, pid), number)
    _forked.update(pids)
    for number, pid in pids.items():
        threading.Thread(target=_tell_end, args=(number, pid), name="nbgpu-watch", daemon=True).start()
    return pids


def _tell_end(number: int, pid: int) -> None:
    """Tell the hub as soon as an engine's process has ended."""
    with suppress(ProcessLookupError):
        descriptor = watched.watch(pid, _folder)
        select.select([descriptor], [], [])
        os.close(descriptor)
    # An engine's last messages take another path than the news of its end.
    time.sleep(_OBITUARY_PATIENCE_S)
    _unregister(number)


def _unregister(number: int) -> None:
    """Tell the hub that an engine has ended, or is about to."""
    import zmq
    from ipyparallel import util
    from ipyparallel.engine.app import IPEngine

    app = IPEngine.instance()
    registrar: Any = zmq.Context.instance().socket(zmq.DEALER)
    registrar.linger = 3000
    with registrar:
        keys = {key: getattr(app, key) for key in ("curve_serverkey", "curve_publickey", "curve_secretkey")}
        util.connect(registrar, app.registration_url, **keys)
        app.session.send(registrar, "unregistration_request", content={"id": number})


def call(method: str, *args: Any) -> Any:
    """Call a method of this host's `ThisHost`."""
    return getattr(_here, method)(*args)


def _own_stacks() -> Stacks:
    global _stacks
    if _stacks is None:
        _stacks = _here.stacks()
    return _stacks


def look(pids: Sequence[int], patience_s: float) -> dict[int, Any]:
    """Ask ranks where they are.

    Returns:
        By pid, the fields of the answer (None if it owes one), then whether it computes, whether it waits in
        the system, and why it stands still.
    """
    stacks = _own_stacks()
    stacks.ask(pids)
    answers: dict[int, MainThreadState] = stacks.collect(patience_s)
    found = {}
    for pid in pids:
        answer = answers.get(pid)
        owes = answer is None and stacks.silent_s(pid) > 0
        found[pid] = (
            None if answer is None else asdict(answer),
            stacks.computes(pid) if owes else False,
            stacks.waits_in_the_system(pid),
            stacks.standstill(pid),
        )
    return found


def cell_line(pid: int) -> int | None:
    """The line of the cell that a rank is at."""
    return _own_stacks().cell_line(pid)


if __name__ == "__main__":
    # The client's calls find this module under its name.
    import_module("nbgpu.engine.process.host").main()
