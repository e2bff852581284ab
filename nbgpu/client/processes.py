"""The processes of a cluster on this host: ipyparallel's controller, and the engines."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher
from traitlets.log import get_logger

from nbgpu.errors import ClusterError

_log = logging.getLogger("nbgpu.cluster")
_log.addHandler(logging.NullHandler())

_HEARTBEAT_PERIOD_MS = 100
"""ipyparallel counts an engine as there after its first heartbeat; its default of 3 s is felt at every start."""
_HEARTBEATS_MISSED = 30
_OBITUARY_PATIENCE_S = 0.2


class _NurseryLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """Starts all engines through one process that imports torch once and forks them (engine/boot.py)."""

    def find_args(self) -> list[str]:
        return [sys.executable, "-m", "nbgpu.engine.boot", str(self.n)]

    def start(self, n: int) -> Any:
        self.n = n
        return super().start()


class _ControllerLauncher(LocalControllerLauncher):  # type: ignore[misc]
    """Starts ipyparallel's controller so that it ends with this process."""

    def find_args(self) -> list[str]:
        own = [sys.executable, "-m", "nbgpu.client.controller", str(os.getpid())]
        return own + list(self.cluster_args) + list(self.controller_args)


class Processes:
    """Starts the processes, connects to them and ends them.

    Args:
        num_engines: how many engines.
        environment: variables that the engines get beside this process's own.

    Attributes:
        folder: the cluster's own, which only the user can enter; it goes when the cluster ends.
    """

    def __init__(self, num_engines: int, environment: Mapping[str, str]) -> None:
        self._num_engines = num_engines
        self.folder = Path(tempfile.mkdtemp(prefix="nbgpu-"))
        profile = self.folder / "profile"
        profile.mkdir(mode=0o700)
        self._cluster = ipp.Cluster(
            n=num_engines,
            engines=_NurseryLauncher,
            controller=_ControllerLauncher,
            controller_ip="127.0.0.1",
            controller_args=[
                f"--HeartMonitor.period={_HEARTBEAT_PERIOD_MS}",
                f"--HeartMonitor.max_heartmonitor_misses={_HEARTBEATS_MISSED}",
                "--IPController.enable_curve=True",
                # One process with threads in place of six: they start in a third of the time.
                "--IPController.use_threads=True",
                "--IPController.broadcast_scheduler_depth=0",
                "--IPController.db_class=NoDB",
            ],
            profile_dir=str(profile),
            load_profile=False,
            # The engines find the controller's file when it is there, so that both start side by side.
            send_engines_connection_env=False,
            delay=0,
            shutdown_atexit=False,
            parent=None,
            log=_log,
        )
        self._environment = {
            **environment,
            "NBGPU_OWNER_PID": str(os.getpid()),
            "NBGPU_CLUSTER_FOLDER": str(self.folder),
            "PYTHONFAULTHANDLER": "1",
        }

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients."""
        return Path(self._cluster.controller.connection_files["client"])

    def start(self, timeout_s: float) -> Any:
        """Starts all of them and returns ipyparallel's client, to which every engine has come.

        Raises:
            ClusterError: a process ended, or an engine did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        self._cluster.start_engines_sync(self._num_engines, environment=self._environment)
        self._cluster.start_controller_sync()
        with _no_warning_of_missing_signatures():
            client = self._cluster.connect_client_sync()
        try:
            self._wait_for_engines(client, deadline_s, timeout_s)
        except BaseException:
            client.close()
            raise
        return client

    def end(self) -> None:
        """Ends all of them, also what they started, and removes the folder."""
        groups = [process.pid for _, process in self._leaders() if process is not None]
        members = [p for pid in groups for p in _group_members(pid)]
        self._cluster.stop_engines_sync()
        if self._cluster.controller is not None:
            self._cluster.stop_controller_sync()
        # Both are leaders of their own process group: whatever a leader left behind goes with the group.
        for pid in groups:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        psutil.wait_procs(members, timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def how_ended(self, pid: int) -> str | None:
        """How an engine ended, in words that go behind its name; None while it lives."""
        if psutil.pid_exists(pid):
            return None
        told = self.folder / f"ended-{pid}"
        give_up_s = time.monotonic() + _OBITUARY_PATIENCE_S
        while not told.exists() and time.monotonic() < give_up_s:
            time.sleep(0.005)
        code = told.read_text() if told.exists() else ""
        if not code.startswith("-"):
            return "is gone" + (f", with exit code {code}" if code else "")
        name = signal.Signals(-int(code)).name
        guess = "; the kernel's OOM killer?" if name == "SIGKILL" else ""
        if name == "SIGABRT" and "TORCH_DISTRIBUTED_DEBUG" not in self._environment:
            # gloo aborts the process where it is sent more than it expects.
            guess = (
                "; did the ranks call a collective with different sizes? %nbgpu stop, then %nbgpu start --debug names "
                "the calls"
            )
        return f"was killed by {name}{guess}"

    def log_tail(self) -> str:
        """The end of what the engines wrote, as sentences for an error message."""
        logs = sorted((self.folder / "profile" / "log").glob("ipengine*.log"))
        tail = "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-20:])
        return f"The engines' log ends with:\n{tail}" if tail else "The engines' log is empty."

    def _wait_for_engines(self, client: Any, deadline_s: float, timeout_s: float) -> None:
        while len(client.ids) < self._num_engines:
            gone = [name for name, p in self._leaders() if p is None or not p.is_running()]
            if gone:
                raise ClusterError(f"the {' and the '.join(gone)} ended during the start. {self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"{len(client.ids)} of {self._num_engines} engines came within {timeout_s:g} s; give more with "
                    f"start_timeout_s. {self.log_tail()}"
                )
            time.sleep(0.01)

    def _leaders(self) -> list[tuple[str, psutil.Process | None]]:
        nursery, controller = self._cluster.engine_set, self._cluster.controller
        return [
            ("engines' process", nursery.process if nursery else None),
            ("controller", controller.process if controller else None),
        ]


@contextmanager
def _no_warning_of_missing_signatures() -> Iterator[None]:
    """ipyparallel signs no messages where Curve authenticates and encrypts them, and jupyter_client, which does
    not know of Curve, warns of that in words that would alarm a person for no reason."""

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


def _group_members(leader_pid: int) -> list[psutil.Process]:
    """The processes of a process group."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader_pid:
                members.append(process)
    return members
