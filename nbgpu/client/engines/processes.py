"""The processes of a cluster on this host: ipyparallel's controller, and the fork server with its engines."""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from traitlets.log import get_logger

from nbgpu.client.engines import preloading
from nbgpu.errors import ClusterError
from nbgpu.host import launch
from nbgpu.host.host import Host
from nbgpu.host.this_host import ThisHost
from nbgpu.machine import processes, watched
from nbgpu.machine.processes import ProcessId, signal_name
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.cluster_processes import KEPT
from nbgpu.protocol.meeting import MEETING

logging.getLogger("nbgpu.cluster").addHandler(logging.NullHandler())

_EXIT_CODE_PATIENCE_S = 1.0
_LOOK_PERIOD_S = 0.05
"""For this time the processes count as alive after a check: cells may be sent every few milliseconds."""
_REPLY_TIMEOUT_S = 1.0
_REGISTRATION_TIMEOUT_S = 5.0
"""The controller reports an engine to a client once. A client that connects while the engine registers may
miss the report, and would wait for ever: after this time a new client gets a list of all engines."""
_serializers_tables = threading.Lock()


class Processes:
    """The processes of one cluster, started by this process or by an earlier kernel that has ended.

    Args:
        folder: the cluster's private folder, which is removed when the cluster ends.
        leaders: the controller and the fork server, which lead process groups, by their names in messages;
            empty before the start.
    """

    def __init__(self, folder: Path, leaders: Mapping[str, ProcessId] | None = None) -> None:
        self.leaders = dict(leaders or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """The leaders that this process has started."""
        self._reachable_mono_s = -math.inf
        self.folder = folder
        self.this_host: Host = ThisHost(folder, from_start=not leaders)

    @property
    def connection_file(self) -> Path:
        """ipyparallel's connection file for clients."""
        return self.folder / "profile" / "security" / f"ipcontroller-{launch.CLUSTER_ID}-client.json"

    @property
    def meeting_file(self) -> Path:
        """The file with the address of the rendezvous store. It is written before `connection_file`."""
        return self.folder / MEETING

    def launch(self, environment: Mapping[str, str], ip: str = "") -> None:
        """Launch the fork server and the controller, or use the preloaded ones, and return at once.

        Args:
            environment: the variables that the engines get in addition to this process's own.
            ip: the address at which the controller listens for other hosts; empty if the ranks run on this
                one.
        """
        if ip:
            preloading.dismiss()
        ready = None if ip else preloading.take(environment)
        launched = ready or launch.launch(self.folder, environment, ip)
        self.folder = launched.folder
        self.this_host = ThisHost(launched.folder, from_start=True)
        self._children = launched.children
        for name, child in launched.children.items():
            try:
                self.leaders[name] = ProcessId.of(child.pid)
            except ProcessLookupError:
                raise self._ended_during_start([name]) from None

    # Otherwise an interrupt while the client is made would leave its thread and its sockets behind.
    @uninterrupted()
    def connect(self, num_engines: int, timeout_s: float) -> Any:
        """Connect ipyparallel's client, and return it once all engines have registered.

        Args:
            num_engines: the number of engines; 0 where none is started on this host.
            timeout_s: the time for the controller and the engines together.

        Raises:
            ClusterError: a process ended, or an engine did not come in time.
        """
        # Here, because the processes start during this import, which takes a quarter of a second.
        from nbgpu.client.engines.connection import Client

        deadline_s = time.monotonic() + timeout_s

        def poll(num_registered: int) -> None:
            self._poll_start(num_registered, num_engines, deadline_s, timeout_s)

        while (connection := self._connection()) is None:
            poll(0)
        _fill_serializers_tables()
        registration_timeout_s = _REGISTRATION_TIMEOUT_S
        while True:
            client = _connected(partial(Client, connection), poll, deadline_s)
            reconnect_mono_s = time.monotonic() + registration_timeout_s
            try:
                while len(client.ids) < num_engines and time.monotonic() <= reconnect_mono_s:
                    poll(len(client.ids))
            except BaseException:
                client.close()
                raise
            if len(client.ids) >= num_engines:
                return client
            # This client may have missed an engine that registered while it connected; the next one gets a
            # list of all engines.
            client.close()
            registration_timeout_s *= 2

    def keep(self) -> None:
        """Let the processes run on when this process ends."""
        (self.folder / KEPT).touch(mode=0o600)

    def end(self) -> None:
        """End the processes with everything that they have started, and remove the folder."""
        processes.end(self.leaders.values())
        for child in self._children.values():
            child.wait()
        self._children = {}
        watched.hide(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def require_reachable(self) -> None:
        """Raise ClusterError if the controller or the fork server is gone."""
        now_s = time.monotonic()
        if now_s - self._reachable_mono_s < _LOOK_PERIOD_S:
            return
        gone = self.unreachable()
        if gone:
            raise ClusterError(f"{gone}; the ranks cannot be reached: %nbgpu stop, then %nbgpu start")
        self._reachable_mono_s = now_s

    def unreachable(self) -> str | None:
        """Return why the engines can no longer be reached: which of the processes has ended, and how. None
        while they can be reached."""
        gone = [name for name, process in self.leaders.items() if not process.alive()]
        if not gone:
            return None
        # Only the parent learns how a process ended, and a kernel that has attached is not the parent.
        codes = {name: self._exit_code(name) for name in gone if name in self._children}
        # If one of them was killed, the others have ended because of that, and with exit code 0.
        for name, code in codes.items():
            if code is not None and code < 0:
                return f"the {name} of the cluster is gone (killed by {signal_name(-code)})"
        return f"the {' and the '.join(gone)} of the cluster {'are' if len(gone) > 1 else 'is'} gone"

    def _exit_code(self, name: str) -> int | None:
        """The exit code of a process that has ended, or None if the system does not report it in time."""
        try:
            return self._children[name].wait(_EXIT_CODE_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None

    def _connection(self) -> dict[str, Any] | None:
        """The content of ipyparallel's connection file; None while the controller has not written it."""
        try:
            connection: dict[str, Any] = json.loads(self.connection_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return connection

    def _ended_during_start(self, gone: Sequence[str]) -> ClusterError:
        """Return the error for processes that have ended; raise KeyboardInterrupt if an interrupt has ended
        them."""
        # Until a process has its own session, Ctrl-C reaches it together with this process.
        take_interrupt()
        log = self.this_host.log_tail("controller" if gone == ["controller"] else "engines")
        return ClusterError(f"the {' and the '.join(gone)} ended during the start. {log}")

    def _poll_start(self, num_registered: int, num_engines: int, deadline_s: float, timeout_s: float) -> None:
        """Wait a moment during the start.

        Raises:
            ClusterError: a process has ended, or at `deadline_s` the engines are late, or the controller is
                if no engine is expected.
        """
        gone = [name for name, process in self.leaders.items() if not process.alive()]
        gone += ["process of an engine"] * self.this_host.num_ended()
        if gone:
            raise self._ended_during_start(gone)
        if time.monotonic() > deadline_s:
            if not num_engines:
                log = self.this_host.log_tail("controller")
                raise ClusterError(
                    f"the controller did not answer within {timeout_s:g} s; give more with start_timeout_s. {log}"
                )
            raise ClusterError(
                f"{num_registered} of {num_engines} engines came within {timeout_s:g} s; give more with "
                f"start_timeout_s. {self.this_host.log_tail()}"
            )
        time.sleep(0.01)
        take_interrupt()


def _connected(make_client: Callable[..., Any], poll: Callable[[int], None], deadline_s: float) -> Any:
    """Return a client that is connected to the controller. If the controller does not answer, try again with
    twice the patience.

    Args:
        make_client: makes a client with a `timeout`, in seconds, after which it raises TimeoutError.
        poll: raises ClusterError if a process has ended, or at the deadline.
        deadline_s: the deadline, by the monotonic clock.
    """
    reply_timeout_s = _REPLY_TIMEOUT_S
    while True:
        try:
            with _hide_unsigned_warning():
                return make_client(timeout=reply_timeout_s)
        except TimeoutError:
            # The controller has ended after it wrote the connection file, or is busy.
            poll(0)
            left_s = max(_REPLY_TIMEOUT_S, deadline_s - time.monotonic())
            reply_timeout_s = min(2 * reply_timeout_s, left_s)


def _fill_serializers_tables() -> None:
    """Use ipyparallel's serializer once, under a lock. The first use fills its global tables, and two threads
    that start clusters at the same time would disturb each other there."""
    from ipyparallel.serialize.canning import can, uncan

    with _serializers_tables:
        can(object())
        uncan(object())


@contextmanager
def _hide_unsigned_warning() -> Iterator[None]:
    """Hide jupyter_client's warning about unsigned messages. ipyparallel does not sign them because CurveZMQ
    authenticates and encrypts them, which jupyter_client does not know."""

    def is_other_message(record: logging.LogRecord) -> bool:
        return "Message signing is disabled" not in record.getMessage()

    log = get_logger()
    if isinstance(log, logging.LoggerAdapter):
        log = log.logger
    log.addFilter(is_other_message)
    try:
        yield
    finally:
        log.removeFilter(is_other_message)
