"""The processes of a cluster on this host: ipyparallel's controller, the fork server and its engines."""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from traitlets.log import get_logger

from nbgpu.client.engines import preloading
from nbgpu.errors import ClusterError
from nbgpu.host import launch
from nbgpu.host.host import Host
from nbgpu.host.this_host import ThisHost
from nbgpu.machine import processes, watched
from nbgpu.machine.processes import ProcessId
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.cluster_processes import KEPT
from nbgpu.protocol.meeting import MEETING

logging.getLogger("nbgpu.cluster").addHandler(logging.NullHandler())

_EXIT_CODE_PATIENCE_S = 1.0
_LOOK_PERIOD_S = 0.05
"""Cells that are sent every few milliseconds do not look at the processes each time."""
_REPLY_TIMEOUT_S = 1.0
_REGISTRATION_TIMEOUT_S = 5.0
"""The controller tells a client of an engine once. A client that connects while the engine registers may miss
that, and would wait for ever: after this time another one asks for all that are there."""
_serializers_tables = threading.Lock()


class Processes:
    """The processes of one cluster, which this process or a kernel that is gone has started.

    Args:
        folder: the cluster's own, which only the user can enter; it goes when the cluster ends.
        leaders: of the processes' groups, by what messages call them; empty before the start.
    """

    def __init__(self, folder: Path, leaders: Mapping[str, ProcessId] | None = None) -> None:
        self.leaders = dict(leaders or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """The leaders that this process has started."""
        self._reachable_mono_s = -math.inf
        self.folder = folder
        self.this_host: Host = ThisHost(folder, from_start=not leaders)

    @classmethod
    def prepare(cls) -> Self:
        """The processes of a cluster that is to be started. Its folder has a name, but does not exist yet."""
        return cls(launch.new_folder())

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients."""
        return self.folder / "profile" / "security" / f"ipcontroller-{launch.CLUSTER_ID}-client.json"

    @property
    def meeting_file(self) -> Path:
        """The file that says where the ranks meet. It is there before `connection_file` is."""
        return self.folder / MEETING

    def launch(self, environment: Mapping[str, str], ip: str = "") -> None:
        """Launch the fork server and the controller, or take over the preloaded ones, and return at once.

        Args:
            environment: the engines' variables beside this process's own.
            ip: where the ranks will be on other hosts, the address at which the controller listens for them.
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

    # Cut in two, the client would leave a thread and sockets that nobody knows.
    @uninterrupted()
    def connect(self, num_engines: int, timeout_s: float) -> Any:
        """Connect ipyparallel's client, and return it once all engines have registered.

        Args:
            num_engines: the number of engines; 0 where none is started on this host.
            timeout_s: the time for the controller and the engines together.

        Raises:
            ClusterError: a process ended, or an engine did not come in time.
        """
        # Here, because the processes are launched before ipyparallel is imported, which takes a quarter of a
        # second.
        from nbgpu.client.engines.connection import Client

        deadline_s = time.monotonic() + timeout_s
        while (connection := self._connection()) is None:
            self._poll_start(0, num_engines, deadline_s, timeout_s)
        _fill_serializers_tables()
        # A client that connects while an engine registers can miss the engine's registration. After a while
        # it is replaced by a new one, which gets a list of all engines.
        client = None
        reply_timeout_s, registration_timeout_s = min(_REPLY_TIMEOUT_S, timeout_s), _REGISTRATION_TIMEOUT_S
        reconnect_mono_s = math.inf
        try:
            while client is None or len(client.ids) < num_engines:
                if client is None:
                    try:
                        with _hide_unsigned_warning():
                            client = Client(connection, timeout=reply_timeout_s)
                    except TimeoutError:
                        # The controller has ended after it wrote the connection file, or is busy: it gets
                        # more time, within what is left.
                        self._poll_start(0, num_engines, deadline_s, timeout_s)
                        left_s = max(_REPLY_TIMEOUT_S, deadline_s - time.monotonic())
                        reply_timeout_s = min(2 * reply_timeout_s, left_s)
                    else:
                        reconnect_mono_s = time.monotonic() + registration_timeout_s
                    continue
                self._poll_start(len(client.ids), num_engines, deadline_s, timeout_s)
                if time.monotonic() > reconnect_mono_s:
                    client.close()
                    client = None
                    registration_timeout_s *= 2
        except BaseException:
            if client is not None:
                client.close()
            raise
        return client

    def keep(self) -> None:
        """Let the processes outlive this one."""
        (self.folder / KEPT).touch(mode=0o600)

    def end(self) -> None:
        """End all of them and what they have started, and remove the folder."""
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
        """The reason why the engines can no longer be reached, in words; None while they can."""
        gone = [name for name, process in self.leaders.items() if not process.alive()]
        if not gone:
            return None
        # Only a parent learns how a process ended, and a kernel that has attached is not their parent.
        codes = {name: self._exit_code(name) for name in gone if name in self._children}
        # If one is killed, the others end in good order.
        for name, code in codes.items():
            if code is not None and code < 0:
                return f"the {name} of the cluster is gone (killed by {signal.Signals(-code).name})"
        return f"the {' and the '.join(gone)} of the cluster {'are' if len(gone) > 1 else 'is'} gone"

    def _exit_code(self, name: str) -> int | None:
        """The exit code of a process that is gone; None if it is not known."""
        try:
            return self._children[name].wait(_EXIT_CODE_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None

    def _connection(self) -> dict[str, Any] | None:
        """The content of ipyparallel's file for clients; None while the controller has not written all of
        it."""
        try:
            connection: dict[str, Any] = json.loads(self.connection_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return connection

    def _ended_during_start(self, gone: Sequence[str]) -> ClusterError:
        """Return the error for these processes, unless an interrupt ended them: then raise that."""
        # Until a process has a session of its own it gets the interrupts of this one's group, too.
        take_interrupt()
        log = self.this_host.log_tail("controller" if gone == ["controller"] else "engines")
        return ClusterError(f"the {' and the '.join(gone)} ended during the start. {log}")

    def _poll_start(self, num_there: int, num_engines: int, deadline_s: float, timeout_s: float) -> None:
        """Wait a moment; ClusterError if a process has ended, or the engines, or with none the
        controller, are late."""
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
                f"{num_there} of {num_engines} engines came within {timeout_s:g} s; give more with "
                f"start_timeout_s. {self.this_host.log_tail()}"
            )
        time.sleep(0.01)
        take_interrupt()


def _fill_serializers_tables() -> None:
    """Have ipyparallel fill the tables of its serializer, which it does at the first use. Two threads that
    each start a cluster would interfere with each other there."""
    from ipyparallel.serialize.canning import can, uncan

    with _serializers_tables:
        can(object())
        uncan(object())


@contextmanager
def _hide_unsigned_warning() -> Iterator[None]:
    """Hide a warning without cause. ipyparallel signs no messages if Curve authenticates and encrypts them,
    and jupyter_client, which does not know of Curve, warns of that."""

    def is_not_that(record: logging.LogRecord) -> bool:
        return "Message signing is disabled" not in record.getMessage()

    log = get_logger()
    if isinstance(log, logging.LoggerAdapter):
        log = log.logger
    log.addFilter(is_not_that)
    try:
        yield
    finally:
        log.removeFilter(is_not_that)
