"""The functions that the client calls on a host of its cluster, in the host's own engine (host.py)."""

from __future__ import annotations

import os
import platform
import select
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbgpu.config import site
from nbgpu.errors import NbgpuError
from nbgpu.host import host_checks, versions
from nbgpu.host.free_gpus import GpuChooser
from nbgpu.host.questions import Listener
from nbgpu.host.served_folder import ServedFolder
from nbgpu.host.stacks import Stacks
from nbgpu.host.this_host import ThisHost
from nbgpu.machine import cgroups, devices, numa, watched
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.protocol.hosts import HostDescription
from nbgpu.protocol.meeting import MEETING
from nbgpu.protocol.records import Device, MainThreadState
from nbgpu.protocol.served import Changes, Piece

OBITUARY_PATIENCE_S = 0.15
"""How long the message about an engine's end is delayed: the engine's last messages take another path."""

_MAX_ASKERS = 4

_here: ThisHost
_folder: Path
_address: tuple[str, str]
_stacks: dict[str, Stacks] = {}
"""The connections to ranks that report their main threads, by the name of the asker, the newest last."""
_listener: Listener | None = None
_served: dict[str, ServedFolder] = {}
"""The copies of folders that this host does not see, by the path on the notebook's host."""
forked: set[int] = set()
"""The numbers of the engines of ranks here, also of those that have ended."""


def serve(here: ThisHost, folder: Path, address: tuple[str, str]) -> None:
    """Make the functions of this module ready to be called.

    Args:
        here: this host.
        folder: the cluster's folder here.
        address: the interface through which this host reaches the controller, and its address there.
    """
    global _here, _folder, _address
    _here, _folder, _address = here, folder, address


def say(line: str) -> None:
    """Write a line to this process's own standard error, for the person or the launcher that has started this
    host: ipykernel sends the text of `print` to the client."""
    print(f"{platform.node()}: {line}", file=sys.__stderr__, flush=True)


def describe(gpus: str, ranks: int | None, backends: Sequence[str]) -> dict[str, Any]:
    """Return the fields of this host's `HostDescription`. If the settings cannot be met here, nothing is
    raised, and the field `problem` has the reason.

    Args:
        gpus: the cluster's setting, for this host.
        ranks: the number of ranks on this host; None for one on each GPU.
        backends: the backends of torch.distributed that the ranks may use.
    """
    chosen: Sequence[Device] = ()
    problem = ""
    try:
        chosen = _chosen(gpus, ranks)
        site.require_within_limit(len({device.uuid for device in chosen if device.kind == "cuda"}))
        host_checks.require_startable(os.environ, backends, len(chosen))
    except NbgpuError as error:
        problem = str(error)
    return asdict(
        HostDescription(
            name=platform.node(),
            interface=_address[0],
            address=_address[1],
            folder=str(_folder),
            meeting_file=str(_folder / MEETING),
            versions=versions.here(),
            num_cores=cgroups.usable_cores(),
            numa_nodes=numa.bindable(),
            devices=tuple(asdict(device) for device in chosen),
            problem=problem,
        )
    )


def _chosen(gpus: str, ranks: int | None) -> tuple[Device, ...]:
    """Return this host's devices for the ranks; with gpus="auto" the free GPUs."""
    if not gpus_setting.takes_free(gpus):
        return devices.choose(gpus, ranks)
    with closing(GpuChooser()) as chooser:
        return chooser.choose(gpus, ranks, most=site.most_gpus())


def content_of(file: str) -> str | None:
    """Return the text of a small file as this host sees it; None if the file cannot be read."""
    try:
        return Path(file).read_text()
    except OSError:
        return None


def new_lines(files: dict[str, int], max_bytes: int) -> dict[str, bytes]:
    """Return the complete lines that were appended to files, by file; files without a new line are left out.

    Args:
        files: for each file the offset in bytes from which lines are new.
        max_bytes: the most bytes to return of each file.
    """
    lines = {}
    for file, offset_bytes in files.items():
        with suppress(OSError), Path(file).open("rb") as opened:
            content = os.pread(opened.fileno(), max_bytes, offset_bytes)
            if whole := content[: content.rfind(b"\n") + 1]:
                lines[file] = whole
    return lines


def fork(numbers: Sequence[int]) -> dict[int, int]:
    """Fork engines with these numbers; return their pids by number."""
    pids: dict[int, int] = {}
    say(f"{len(numbers)} rank(s) start here")
    for number in numbers:
        _here.fork_engine(lambda pid, engine: pids.__setitem__(engine, pid), number)
    forked.update(pids)
    for number, pid in pids.items():
        threading.Thread(target=_watch_end, args=(number, pid), name="nbgpu-watch", daemon=True).start()
    return pids


def _watch_end(number: int, pid: int) -> None:
    """Wait for the end of an engine's process, and unregister the engine at the hub."""
    with suppress(ProcessLookupError):
        descriptor = watched.watch(pid, _folder)
        select.select([descriptor], [], [])
        os.close(descriptor)
    time.sleep(OBITUARY_PATIENCE_S)
    unregister(number)


def unregister(number: int) -> None:
    """Unregister an engine that has ended, or is about to end, at ipyparallel's hub. Call on any thread."""
    import zmq
    from ipyparallel import util
    from ipyparallel.engine.app import IPEngine

    app = IPEngine.instance()
    # A socket of its own, because those of ipyparallel's engine belong to the thread of its event loop.
    registrar: Any = zmq.Context.instance().socket(zmq.DEALER)
    # The socket is closed at once; ZeroMQ goes on sending for at most 3 s.
    registrar.linger = 3000
    with registrar:
        keys = {key: getattr(app, key) for key in ("curve_serverkey", "curve_publickey", "curve_secretkey")}
        util.connect(registrar, app.registration_url, **keys)
        app.session.send(registrar, "unregistration_request", content={"id": number})


def call(method: str, *args: Any) -> Any:
    """Call a method of this host's `ThisHost`."""
    return getattr(_here, method)(*args)


def _asker_stacks(asker: str) -> Stacks:
    """Return the connections to the ranks that one asker uses. They are not shared between askers: on a
    shared connection an answer to another asker, of an earlier moment, could come first."""
    stacks = _stacks.pop(asker, None) or _here.stacks()
    _stacks[asker] = stacks
    while len(_stacks) > _MAX_ASKERS:
        _stacks.pop(next(iter(_stacks))).close()
    return stacks


def questions(method: str, *args: Any) -> Any:
    """Call a method of the `Listener` to which the ranks of this host send their questions (`input()`):
    'look', 'answer', 'refuse' or 'close'; 'open' makes one.

    Opening ends the questions that an earlier notebook has left unanswered. The result of 'look' is a dict of
    questions; that of other methods is None.
    """
    global _listener
    if method == "open":
        if _listener is not None:
            _listener.close()
        _listener = Listener(_folder)
        return None
    if _listener is None:
        return {}
    result = getattr(_listener, method)(*args)
    if method == "close":
        _listener = None
    return {number: asdict(question) for number, question in result.items()} if method == "look" else None


def look(pids: Sequence[int], patience_s: float, asker: str) -> dict[int, Any]:
    """Ask ranks what their main threads are doing.

    Args:
        pids: the ranks' processes.
        patience_s: the time to wait for their answers.
        asker: the name of the asker, the same in all its calls.

    Returns:
        By pid: the fields of the rank's MainThreadState (None if it has not answered), whether it uses its
        processor, whether it waits in the operating system, and the reason why its process stands still.
    """
    stacks = _asker_stacks(asker)
    stacks.ask(pids)
    answers: dict[int, MainThreadState] = stacks.collect(patience_s)
    states = {}
    for pid in pids:
        answer = answers.get(pid)
        # Only a rank that has not answered is looked up in /proc, because that takes time.
        owes = answer is None and stacks.silent_s(pid) > 0
        states[pid] = (
            None if answer is None else asdict(answer),
            stacks.computes(pid) if owes else False,
            stacks.waits_in_the_system(pid),
            stacks.standstill(pid),
        )
    return states


def cell_line(pid: int) -> int | None:
    """Return the line of the running cell at which a rank is; None if the line is not known."""
    return _here.stacks().cell_line(pid)


def keep_copy(folder: str) -> None:
    """Make a copy of a folder that this host does not see, unless there is one."""
    if folder not in _served:
        _served[folder] = ServedFolder(folder, _folder)


def remove_copies(keep: Sequence[str]) -> None:
    """Remove the copies of all folders but these.

    Args:
        keep: the folders, as the notebook's host calls them.
    """
    for folder in [served for served in _served if served not in keep]:
        _served.pop(folder).remove()


def put_in_copy(folder: str, pieces: Sequence[Piece]) -> list[int]:
    """Write pieces of files into the copy of a folder; return for each piece the size in bytes of its file
    afterwards."""
    return [_served[folder].put(Piece(*piece)) for piece in pieces]


def sizes_in_copy(folder: str, inside: str) -> dict[str, int]:
    """Return the sizes in bytes of the files in a folder of a copy, by name."""
    return _served[folder].sizes(inside)


def changes_in_copy(folder: str, max_bytes: int, have: dict[str, int]) -> Changes:
    """Return what ranks on this host have written into the copy of a folder since the last call, at most
    `max_bytes`.

    Args:
        folder: the folder, as the notebook's host calls it.
        max_bytes: the most bytes to return.
        have: the files, with their sizes, that the notebook's host has.
    """
    return _served[folder].changes(max_bytes, have)
