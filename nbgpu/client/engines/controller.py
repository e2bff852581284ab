"""ipyparallel's controller, with the ranks' rendezvous store (meeting.py) in the same process.

    python -m nbgpu.client.engines.controller CLUSTER_FOLDER OWNER_PID FORK_SERVER_PID [ARGUMENTS]

The process ends when the owner (the notebook's kernel) or the fork server has ended. If all ranks are on
other hosts there is no fork server here, and its pid is 0. ARGUMENTS are those of ipyparallel's controller.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nbgpu.machine import watched
from nbgpu.machine.files import write_whole
from nbgpu.machine.interfaces import LOOPBACK
from nbgpu.machine.watched import LifetimeWatch, end_with
from nbgpu.protocol.cluster_processes import engine_host, engine_pid
from nbgpu.protocol.hosts import FIRST_NUMBER

_ABANDONED_S = 600.0
"""A kept cluster on other hosts ends when it has had no host for this time, as after a job's time limit."""
_LOOK_PERIOD_S = 2.0
_FAREWELL_S = 1.0
"""An engine is unregistered so long after the end of its process, and its last messages arrive meanwhile."""


def main() -> None:
    """Run the controller until it is stopped, or until its owner or the fork server is gone."""
    folder = Path(sys.argv.pop(1))
    owner_pid, fork_server_pid = (int(sys.argv.pop(1)) for _ in range(2))
    watched.show(folder)
    others = [fork_server_pid] if fork_server_pid else []
    lifetime = LifetimeWatch(folder, watched.watch(owner_pid, folder), others)

    def end_with_the_others() -> None:
        """Wait until the owner or the fork server has ended, and end this process.

        The owner of a kept cluster may end: `over` then stops watching it. If there is no fork server here
        either, nothing is left to watch, and the cluster ends when it has been without engines for minutes.
        """
        while lifetime.fds and not lifetime.over(select.select(lifetime.fds, [], [])[0]):
            pass
        if not lifetime.fds:
            wait_until_abandoned(lambda: Controller.instance().hub.engines)
        if not fork_server_pid:
            # There is no fork server here to remove it, as the last process of the cluster.
            shutil.rmtree(folder, ignore_errors=True)
        # Exit code 0, to differ from a controller that was killed. The processes that it has forked notice
        # its end.
        os._exit(0)

    threading.Thread(target=end_with_the_others, name="nbgpu-lifetime", daemon=True).start()
    multiprocessing.set_start_method("fork")
    # Without this, the helper processes that the controller forks would outlive a controller that is killed.
    os.register_at_fork(after_in_child=partial(end_with, os.getpid()))
    from ipyparallel.controller.app import IPController

    from nbgpu.client.engines import meeting

    port_holders: list[socket.socket] = []
    """Kept open until the process ends."""

    class Controller(IPController):  # type: ignore[misc]
        """ipyparallel's controller with reserved ports, and with a hub that gets no copies of messages.

        ipyparallel's hub receives a copy of each message for its database. There is none here, and parsing
        the copies would take cores from the ranks.
        """

        def next_port(self, pool_name: str = "common") -> int:
            holder = hold_port(self.engine_ip)
            port_holders.append(holder)
            port: int = holder.getsockname()[1]
            return port

        def to_work_dir(self) -> None:
            """Stay in the current folder: ipyparallel would put its folder in front of the module path."""

        def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
            # In one step: an engine reads its file as soon as it exists, and would fail on half of it.
            write_whole(Path(self.profile_dir.security_dir) / fname, json.dumps(cdict), mode=0o600)

        def init_hub(self) -> None:
            # Before the hub, because ranks that can be called need it. Its thread keeps the object alive.
            meeting.Server(self.engine_ip, folder)
            super().init_hub()
            copies = self.hub.monitor.socket
            copies.unsubscribe(b"")
            copies.subscribe(b"heartmonitor")
            unregister_engines_that_end(self.hub, folder)

    Controller.launch_instance()


def wait_until_abandoned(engines: Callable[[], object]) -> None:
    """Wait until a kept cluster, whose engines are on other hosts, has had no engine for `_ABANDONED_S`.

    Args:
        engines: returns the engines that are registered now.
    """
    last_mono_s = time.monotonic()
    while time.monotonic() - last_mono_s < _ABANDONED_S:
        if engines():
            last_mono_s = time.monotonic()
        time.sleep(_LOOK_PERIOD_S)


def hold_port(ip: str = LOOPBACK) -> socket.socket:
    """Reserve a free port of an address of this host. While the returned socket is open, only ZeroMQ can bind
    the port.

    By itself, ipyparallel chooses a free port and binds it a moment later. If another controller, started at
    the same time, binds the port first, a thread of ipyparallel dies silently, and the start would hang.
    """
    holder = socket.socket()
    holder.bind((ip, 0))
    # zmq sets this option too. Set it after the bind: before it, the system might give the same port to two
    # holders.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def unregister_engines_that_end(hub: Any, folder: Path) -> None:
    """Make ipyparallel's hub unregister an engine when its process has ended, and not when it misses
    heartbeats.

    An engine that misses heartbeats may be stopped, held by a debugger or in a frozen control group, or the
    whole host may have slept. If the hub unregistered it, no client would get its answers once it goes on.
    """
    finish_registration = hub.finish_registration

    def finish_registration_and_watch(heart: bytes) -> None:
        """Register the engine with this heartbeat identity, and watch its process to unregister it."""
        finish_registration(heart)
        engine_id = hub.hearts.get(heart)
        # The id is None if the hub refused the registration. An engine on another host is watched by that
        # host, which reports its end.
        if engine_id is None or engine_host(heart.decode()):
            return

        def unregister() -> None:
            hub.unregister_engine(heart, {"content": {"id": engine_id}})

        try:
            end_descriptor = watched.watch(engine_pid(heart.decode()), folder)
        except ProcessLookupError:
            unregister()
            return

        def on_end(*_: object) -> None:
            hub.loop.remove_handler(end_descriptor)
            os.close(end_descriptor)
            # Later, because the engine's last messages arrive on another socket and come first.
            hub.loop.call_later(_FAREWELL_S, unregister)

        hub.loop.add_handler(end_descriptor, on_end, hub.loop.READ)

    hub.finish_registration = finish_registration_and_watch
    # The heartbeat monitor, a separate process, accepts an engine again as soon as its heartbeats go on.
    hub.handle_stopped_heart = lambda heart: give_up_host(hub, heart)


def give_up_host(hub: Any, heart: bytes) -> None:
    """Unregister a host whose heartbeats have stopped, with all engines on it.

    The host itself ends these engines when it does not hear the controller, and it waits for a shorter time
    than the hub: they have ended by now.
    """
    host = engine_host(heart.decode())
    # Only the engine of the host's program stands for the host: a rank's engine may merely be stopped.
    if not host or hub.hearts.get(heart, 0) < FIRST_NUMBER:
        return
    for other, number in list(hub.hearts.items()):
        if engine_host(other.decode()) == host:
            hub.unregister_engine(other, {"content": {"id": number}})


if __name__ == "__main__":
    main()
