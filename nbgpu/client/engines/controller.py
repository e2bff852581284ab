"""ipyparallel's controller, which ends with the processes without which it is of no use, and, in the same
process, the place where the ranks meet.

    python -m nbgpu.client.engines.controller CLUSTER_FOLDER OWNER_PID FORK_SERVER_PID [ARGUMENTS]

The engines have a sentinel for that, but while a cluster starts there are no engines yet. Where all ranks are
on other hosts there is no fork server here, and its pid is 0.
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
"""A kept cluster on other hosts has ended when no host was there for so long, as after a job's time limit."""
_LOOK_PERIOD_S = 2.0
_FAREWELL_S = 1.0
"""An engine's last messages take another path than the news of its end, and must not arrive after it."""


def main() -> None:
    """Run the controller until it is stopped, or until its owner or the fork server is gone."""
    folder = Path(sys.argv.pop(1))
    owner_pid, fork_server_pid = (int(sys.argv.pop(1)) for _ in range(2))
    watched.show(folder)
    others = [fork_server_pid] if fork_server_pid else []
    lifetime = LifetimeWatch(folder, watched.watch(owner_pid, folder), others)

    def end_with_the_others() -> None:
        """End this process when the owner or the fork server has ended.

        The owner of a cluster that is kept may end: `over` then takes it out. If there is no fork server here
        either, nothing is left to watch, and the cluster ends when it has been without engines for minutes.
        """
        while lifetime.fds and not lifetime.over(select.select(lifetime.fds, [], [])[0]):
            pass
        if not lifetime.fds:
            wait_until_abandoned(lambda: Controller.instance().hub.engines)
        if not fork_server_pid:
            # There is no fork server here to remove it, as the last process of the cluster.
            shutil.rmtree(folder, ignore_errors=True)
        # With 0, so that an exit by a signal means that somebody has killed the controller. The processes
        # that it has forked notice its end.
        os._exit(0)

    threading.Thread(target=end_with_the_others, name="nbgpu-lifetime", daemon=True).start()
    multiprocessing.set_start_method("fork")
    # The helpers that the controller forks would not notice a kill of the controller.
    os.register_at_fork(after_in_child=partial(end_with, os.getpid()))
    from ipyparallel.controller.app import IPController

    from nbgpu.client.engines import meeting

    held: list[socket.socket] = []
    """Open sockets, kept until the process ends."""
    servers: list[meeting.Server] = []
    """The one in which the ranks meet, kept likewise."""

    class Controller(IPController):  # type: ignore[misc]
        """ipyparallel's controller without copies of messages, and with ports that it holds.

        Otherwise the hub receives a copy of each message for its database, which does not exist here, and
        takes each copy apart on the cores that the ranks need for the cell.
        """

        def next_port(self, pool_name: str = "common") -> int:
            holder = hold_port(self.engine_ip)
            held.append(holder)
            port: int = holder.getsockname()[1]
            return port

        def to_work_dir(self) -> None:
            """Stay in this folder. ipyparallel would look for modules there, before the standard library."""

        def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
            # An engine reads its file as soon as there is one, and would end on one that is half written.
            write_whole(Path(self.profile_dir.security_dir) / fname, json.dumps(cdict), mode=0o600)

        def init_hub(self) -> None:
            # The ranks need it as soon as they can be called.
            servers.append(meeting.Server(self.engine_ip, folder))
            super().init_hub()
            copies = self.hub.monitor.socket
            copies.unsubscribe(b"")
            copies.subscribe(b"heartmonitor")
            unregister_engines_that_end(self.hub, folder)

    Controller.launch_instance()


def wait_until_abandoned(engines: Callable[[], object]) -> None:
    """Wait until a kept cluster, whose engines are on other hosts, has had none for some minutes."""
    last_mono_s = time.monotonic()
    while time.monotonic() - last_mono_s < _ABANDONED_S:
        if engines():
            last_mono_s = time.monotonic()
        time.sleep(_LOOK_PERIOD_S)


def hold_port(ip: str = LOOPBACK) -> socket.socket:
    """Return a socket that holds a free port of an address of this host; while it is open, only zmq can bind
    the port.

    ipyparallel picks a port, frees it, and binds it a moment later, in some cases on threads that die
    silently if another process has taken the port by then: the cluster's start would hang. Two controllers
    that start at the same time do that to each other.
    """
    holder = socket.socket()
    holder.bind((ip, 0))
    # zmq sets this option too. Set it after the bind: before it, the system might give the same port to two
    # holders.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def unregister_engines_that_end(hub: Any, folder: Path) -> None:
    """Make ipyparallel's hub give an engine up when its process has ended, and never because it is silent.

    An engine that misses its heartbeats may be stopped, held by a debugger or in a frozen control group, or
    the whole host may have slept. The hub would unregister it for good, and its answers after it goes on
    would reach no client.
    """
    finish_registration = hub.finish_registration

    def finish_registration_and_watch(heart: bytes) -> None:
        """Register an engine, whose identity is `heart`, and unregister it when its process has ended."""
        finish_registration(heart)
        engine_id = hub.hearts.get(heart)
        # None: the hub refused the registration. An engine on another host is watched there, and its host
        # tells of its end.
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
            # The engine's last messages come by another socket, and have to be passed on first.
            hub.loop.call_later(_FAREWELL_S, unregister)

        hub.loop.add_handler(end_descriptor, on_end, hub.loop.READ)

    hub.finish_registration = finish_registration_and_watch
    # The heartbeat monitor, which is a process of its own, accepts an engine again when it goes on.
    hub.handle_stopped_heart = lambda heart: give_up_host(hub, heart)


def give_up_host(hub: Any, heart: bytes) -> None:
    """Unregister a host that is not heard any more, with all engines there.

    The host's lease is shorter than the hub's patience, so that the host has ended these engines by now.
    """
    host = engine_host(heart.decode())
    # Only the host's own engine stands for the host: a rank's engine may merely be stopped.
    if not host or hub.hearts.get(heart, 0) < FIRST_NUMBER:
        return
    for other, number in list(hub.hearts.items()):
        if engine_host(other.decode()) == host:
            hub.unregister_engine(other, {"content": {"id": number}})


if __name__ == "__main__":
    main()
