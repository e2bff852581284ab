"""The process that forks the engines.

    python -m nbgpu.engine.process.fork_server DESCRIPTOR

The process imports torch and ipyparallel. The first request to the socket with this descriptor has the number
of engines to fork. One import takes a fraction of the time that the imports of all engines would take on a
busy host, and happens while ipyparallel's controller starts, or before a cluster is started. A new fork
replaces an engine that has died within a moment.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from nbgpu.engine.ipykernel import streams
from nbgpu.machine import descendants, watched
from nbgpu.machine.files import write_whole
from nbgpu.machine.watched import LifetimeWatch
from nbgpu.protocol.cluster_processes import CLUSTER_FOLDER, CONTROLLER_PID, TAKEN

OWNER_PID = "NBGPU_OWNER_PID"
"""Environment variable with the pid of the process that started the cluster, usually the notebook's
kernel."""

_NEEDED_BY_EVERY_ENGINE = (
    "ipykernel.debugger",
    "ipykernel.zmqshell",
    "ipyparallel.engine.app",
    "nbgpu.engine.ipykernel.kernel",
    "nbgpu.engine.memory.usage",
    "nbgpu.engine.process.boot",
    "nbgpu.engine.process.installers",
    "nbgpu.engine.variables.replicas",
    "torch.nn.parallel",
)
_REQUEST_BYTES = 4096
_STOP_GRACE_S = 1.0
_ORPHANS_GRACE_S = 0.5
_ORPHANS_PERIOD_S = 0.02


class ForkServer:
    """Forks engines from a process that has imported all that they need, and records how they end.

    Each engine gets the next number as ipyparallel's id. To replace an engine that died, the client requests
    another over a Unix socket in the cluster's folder, which only the user can enter: it sends a line of
    JSON, gets one, and acknowledges it. An engine whose number is not acknowledged is ended.

    Processes that an ended engine has left running become children of this process, which ends them.

    Args:
        owner: a descriptor that can be read once the process that started the cluster has ended.
        controller_pid: the pid of ipyparallel's controller.
        folder: the cluster's folder.
        requests: the socket to which the client connects.
    """

    def __init__(self, owner: int, controller_pid: int, folder: Path, requests: socket.socket) -> None:
        self._owner = owner
        self._controller_pid = controller_pid
        self._folder = folder
        self._num_forked = 0
        self._pid_of: dict[int, int] = {}
        """The engines' pids, by the descriptor that can be read once the engine has ended."""
        self._unacknowledged: dict[socket.socket, int] = {}
        """Engines whose numbers were sent and not acknowledged yet, by connection."""
        self._orphans: descendants.Ending | None = None
        """The ending of processes that engines have left; None if there are none."""
        self._requests = requests

    def fork_engine(self, number: int | None = None) -> tuple[int, int]:
        """Fork one engine, which runs until the client ends it; return its number and its pid.

        Args:
            number: the engine's number; None for the next one.
        """
        # Not at the top of the module, because it imports torch, which is done in its turn.
        from nbgpu.engine.process import boot

        fork_server_pid = os.getpid()
        if number is None:
            number = self._num_forked
            self._num_forked += 1
        pid, descriptor = watched.fork()
        if pid == 0:
            # In the engine: close the descriptors of this server that were inherited, and let SIGTERM end the
            # process, which the handler of `main` would otherwise catch. `boot.begin` does not return.
            self._requests.close()
            for other in self._pid_of:
                os.close(other)
            for connection in self._unacknowledged:
                connection.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            watched.show(self._folder)
            lifetime = LifetimeWatch(self._folder, self._owner, [fork_server_pid, self._controller_pid])
            boot.begin(number, lifetime, self._folder)
        self._pid_of[descriptor] = pid
        return number, pid

    def serve(self) -> None:
        """Answer requests and record how engines end, until the controller has ended, or the owner of a
        cluster that does not outlive its owner."""
        lifetime = LifetimeWatch(self._folder, self._owner, [self._controller_pid])
        while True:
            requests = self._requests.fileno()
            connections = {connection.fileno(): connection for connection in self._unacknowledged}
            descriptors = [*lifetime.fds, requests, *self._pid_of, *connections]
            ready = set(select.select(descriptors, [], [], self._end_orphans())[0])
            for descriptor in ready & set(self._pid_of):
                self._reap(descriptor)
            for fd in ready & set(connections):
                self._end_unless_acknowledged(connections[fd])
            if lifetime.over(ready):
                return
            if requests in ready:
                self._answer(self._requests.accept()[0])

    def end(self) -> None:
        """End the engines and the processes that they have started: by SIGTERM first, and by SIGKILL after a
        moment."""
        descendants.end_all(_STOP_GRACE_S)
        for descriptor in select.select(list(self._pid_of), [], [], 0)[0]:
            self._reap(descriptor)

    def _end_orphans(self) -> float | None:
        """Take a step in ending the processes that engines have left behind; return the seconds until the
        next step, None if no process is left."""
        if self._orphans is None:
            return None
        engines = set(self._pid_of.values())
        left = descendants.of_this_process(without=engines)
        for child in psutil.Process().children():
            if child.pid not in engines:
                with suppress(ChildProcessError):  # it has ended, and another one was its parent
                    os.waitpid(child.pid, os.WNOHANG)
        if self._orphans.step(left):
            return _ORPHANS_PERIOD_S
        self._orphans = None
        return None

    def _reap(self, descriptor: int) -> None:
        """Collect the exit status of an engine that has ended, and write it into a file for the client."""
        pid = self._pid_of.pop(descriptor)
        os.close(descriptor)
        status = watched.reap(pid)
        self._orphans = self._orphans or descendants.Ending(_ORPHANS_GRACE_S)
        # Written to a file, because only the parent gets the exit status. `write_whole` renames a complete
        # file, so that the client never reads half of one.
        with suppress(FileNotFoundError):
            write_whole(self._folder / f"ended-{pid}", str(os.waitstatus_to_exitcode(status)))

    def _answer(self, request: socket.socket) -> None:
        """Serve one request of the client: import the packages of a training run, or fork an engine."""
        content = _read(request)
        if content is None:
            request.close()
            return  # this client is gone, and another one may use the engines
        if "train" in content:
            # For engines that are forked from now on. Nobody waits for this import.
            import_module("nbgpu.engine.train").get_ready(content["train"])
            # The imported objects move to the collector's permanent generation: a collection would write to
            # them, and so copy pages that all engines share.
            gc.freeze()
        if "fork" in content:
            self._unacknowledged[request] = 0  # the engine closes its copies of these connections
            number, pid = self.fork_engine(content["fork"])
            self._unacknowledged[request] = pid
            with suppress(OSError):  # `_end_unless_acknowledged` then finds that the client is gone
                request.sendall(json.dumps({"engine": number, "pid": pid}).encode())
        else:
            request.close()

    def _end_unless_acknowledged(self, connection: socket.socket) -> None:
        """End a new engine unless the client has acknowledged it: if the client was interrupted, no process
        knows the engine."""
        pid = self._unacknowledged.pop(connection)
        with connection:
            try:
                is_taken = connection.recv(_REQUEST_BYTES) == TAKEN
            except OSError:
                is_taken = False
        if not is_taken and pid in self._pid_of.values():
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Wait for the owner's request, fork the engines, and more of them on request, until the cluster is
    stopped or its owner has ended; then remove the cluster's folder."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    # The descriptor came through an exec and is inheritable; programs that cells start must not get it.
    requests.set_inheritable(False)
    owner_pid = int(os.environ[OWNER_PID])
    folder = Path(os.environ[CLUSTER_FOLDER])
    watched.show(folder)
    import_what_every_engine_needs()
    descendants.adopt_orphans()
    owner = _owner(owner_pid, folder)
    num_engines = None if owner is None else _num_engines(requests, owner)
    controller_pid = _controller_pid(folder)
    if owner is not None and num_engines is not None and controller_pid is not None:
        fork_server = ForkServer(owner, controller_pid, folder, requests)

        def stop(*_: int | FrameType | None) -> NoReturn:
            fork_server.end()
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
        for _ in range(num_engines):
            fork_server.fork_engine()
        fork_server.serve()
        fork_server.end()
    # This is the last process of the cluster, so it removes the files that the others wrote while they ended.
    with suppress(ProcessLookupError):
        if controller_pid is not None:
            select.select([watched.watch(controller_pid, folder)], [], [], _STOP_GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


def import_what_every_engine_needs() -> None:
    """Import the modules that every engine needs, so that the engines share the time and the memory for them.

    torch starts no thread and does not touch a GPU when it is imported. That makes a fork after it safe.
    """
    gc.disable()  # while modules are imported there is nothing to collect, and looking for it takes time
    for module in _NEEDED_BY_EVERY_ENGINE:
        import_module(module)
    # Before a library that training needs imports tqdm.auto, which chooses once and for all.
    streams.draw_as_text()
    gc.enable()
    gc.freeze()  # keeps the collector from copying the pages that the engines share


def _owner(pid: int, folder: Path) -> int | None:
    """Return a descriptor that can be read once the process `pid`, the owner and parent of this process, has
    ended; None if it has ended already."""
    try:
        owner = watched.watch(pid, folder)
    except ProcessLookupError:
        return None
    # The descriptor was opened first: a process that gets the same number later is not taken for the owner.
    return owner if os.getppid() == pid else None


def _num_engines(requests: socket.socket, owner_fd: int) -> int | None:
    """Wait for the owner's first request and return the number of engines in it; None if the owner, whose
    descriptor can be read once it has ended, ends before that."""
    while requests.fileno() in select.select([requests.fileno(), owner_fd], [], [])[0]:
        with requests.accept()[0] as request:
            content = _read(request)
        # None from a client that went away too early; it may connect again.
        if content is not None:
            num_engines: int = content["begin"]
            return num_engines
    return None


def _read(request: socket.socket) -> dict[str, Any] | None:
    """Return the content of a request; None if the client has gone before the request was complete."""
    try:
        content: dict[str, Any] = json.loads(request.recv(_REQUEST_BYTES))
    except (OSError, ValueError):
        return None
    return content


def _controller_pid(folder: Path) -> int | None:
    """Return the controller's pid; None if the owner ended before it launched a controller."""
    try:
        return int((folder / CONTROLLER_PID).read_text())
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
