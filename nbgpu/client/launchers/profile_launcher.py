"""The launcher of the setting `ipython_profile`: one of ipyparallel's launchers starts the hosts, as the
profile's configuration says.

This makes ipyparallel's launchers for PBS, LSF, SGE, HTCondor and MPI, and those that a site has written
itself, available to nbgpu: they run the host program in place of `ipengine`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from traitlets import TraitError

from nbgpu.client.launchers import shared_folder
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine.signals import take_interrupt, uninterrupted

_CONFIGURATION = "ipcluster_config.py"
_NUM_LINES = 20
_START_PATIENCE_S = 60.0
_END_PATIENCE_S = 10.0
_IDLE_PATIENCE_S = 1.0
"""For the end of the loop's thread. It is left behind if it waits for a command that hangs."""
_POLL_PERIOD_S = 0.05

_log = logging.getLogger("nbgpu.cluster")


class ProfileLauncher(Launcher):
    """Lets the ipyparallel launcher of a profile start the host program on each host.

    Args:
        config: the settings of the cluster.

    Raises:
        ConfigError: there is no such profile, its configuration cannot be read, or its launcher starts only
            ipyparallel's own programs.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        options = {name: str(value) for name, value in config.options_of_launcher.items()}
        self._python = options.get("python", sys.executable)
        self._folder = shared_folder.new_folder(options, ".nbgpu-hosts-")
        self._profile = _profile(config.ipython_profile)
        self._name = self._profile.engine_launcher_class.__name__
        if "SSH" in self._name or "WindowsHPC" in self._name:
            raise ConfigError(
                f"ipython_profile={config.ipython_profile!r} starts engines with {self._name}, which starts only ipyparallel's own programs. "
                "For ssh: launcher='ssh' with hosts"
            )
        self._engines: Any = None
        """ipyparallel's launcher; None before the start."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of ipyparallel's launcher, which learns on it that its processes have ended."""
        self._thread: threading.Thread | None = None
        """Runs the event loop."""

    def start(self, join_file: Path, interface: str) -> None:
        """Submit the job, or start the processes."""
        file = shared_folder.make(self._folder, join_file)
        (self._folder / "log").mkdir()
        try:
            engines = self._profile.engine_launcher_class(
                parent=self._profile,
                work_dir=str(self._folder),
                profile_dir=str(self._folder),
                cluster_id="nbgpu",
                engine_set_id="hosts",
                engine_cmd=[self._python, "-P", "-m", "nbgpu.engine.process.host", str(file)],
                engine_args=[],
            )
        except TraitError as error:
            raise ConfigError(f"ipython_profile={self._config.ipython_profile!r}: {error}") from None
        with uninterrupted():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="nbgpu-profile-launcher", daemon=True
            )
            self._thread.start()
            self._engines = engines
            started = self._wait_for_start(self._ask(lambda: engines.start(self._config.num_hosts)))
        job = f": job {started}" if isinstance(started, str) else ""
        self.tell(
            f"{self._name} of the profile {self._config.ipython_profile} starts {self._config.num_hosts} host(s){job}"
        )

    def _ask(self, call: Callable[[], Any]) -> Future[Any]:
        """Call a method of ipyparallel's launcher, which may be a coroutine, on the thread of the loop."""
        assert self._loop is not None, "start has made it"

        async def result() -> Any:
            value = call()
            return await value if inspect.isawaitable(value) else value

        return asyncio.run_coroutine_threadsafe(result(), self._loop)

    def _wait_for_start(self, pending: Future[Any]) -> Any:
        """Wait for the result of the launcher's `start`, such as the number of a job, and return it. An
        interrupt ends the wait, in case the launcher's command hangs.

        Raises:
            ClusterError: the launcher has failed, or takes too long.
        """
        give_up_s = time.monotonic() + _START_PATIENCE_S
        while not wait([pending], _POLL_PERIOD_S).done:
            take_interrupt()
            if time.monotonic() > give_up_s:
                raise ClusterError(f"{self._name} has not started the hosts within {_START_PATIENCE_S:g} s")
        error = pending.exception()
        if isinstance(error, CalledProcessError):
            output = (error.output or b"").decode(errors="replace").strip()
            raise ClusterError(
                f"{shlex.join(error.cmd)} of {self._name} failed with exit code {error.returncode}"
                f"{f': {output}' if output else ''}"
            )
        if error is not None:
            raise ClusterError(f"{self._name} could not start the hosts: {error}") from error
        return pending.result()

    def check(self) -> None:
        """Raise ClusterError if the job, or all processes, have ended."""
        if self._engines.state == "after":
            output = self._last_lines() or "It has written nothing"
            raise ClusterError(f"what {self._name} has started has ended. {output}")

    def why_late(self) -> str:
        """The last lines of the hosts' output, or what to do if there is none."""
        return self._last_lines() or (
            f"The hosts have written nothing to {self._folder / 'log'}: the job may still wait in its queue. Give it longer "
            "with start_timeout_s, and where hosts do not see that folder, launcher_options={'folder': ...} names another "
            "place"
        )

    def _last_lines(self) -> str:
        """The last lines of the hosts' output, with a heading; empty if there is no output."""
        lines = []
        for path in sorted((self._folder / "log").glob("*")):
            lines += path.read_text(errors="replace").strip().splitlines()
        # ipyparallel reads and removes the files of processes that have ended.
        for output in getattr(self._engines, "outputs", {}).values():
            lines += output.strip().splitlines()
        return "\n".join(["The hosts' output ends with:", *lines[-_NUM_LINES:]]) if lines else ""

    def when_lost(self) -> str:
        """Say that a restart of the cluster starts the hosts again."""
        return f"%nbgpu restart has {self._name} start hosts again"

    @uninterrupted()
    def end(self) -> None:
        """Let ipyparallel's launcher end its job or processes, and remove the folder. Failures are only
        logged: the hosts end with the cluster in any case, and a job that has ended cannot be cancelled."""
        if self._engines is not None and self._engines.state == "running":
            pending = self._ask(self._engines.stop)
            if not wait([pending], _END_PATIENCE_S).done:
                _log.warning("%s has not ended its job within %g s", self._name, _END_PATIENCE_S)
            elif error := pending.exception():
                _log.info("%s: %s", self._name, error)
        self._engines = None
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_IDLE_PATIENCE_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = self._thread = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _profile(name: str) -> Any:
    """Return ipyparallel's `Cluster` with the configuration of a profile.

    Raises:
        ConfigError: there is no such profile, or its configuration cannot be read.
    """
    # Here, because these imports take a while, and few clusters need them.
    from ipyparallel.cluster.cluster import Cluster
    from IPython.core.profiledir import ProfileDir, ProfileDirError
    from IPython.paths import get_ipython_dir
    from traitlets.config.loader import ConfigFileNotFound, PyFileConfigLoader

    try:
        folder = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), name).location
    except ProfileDirError as error:
        raise ConfigError(
            f"ipython_profile={name!r}: {error}. `ipython profile create --parallel {name}` makes one, whose ipcluster_config.py says "
            "how engines are started"
        ) from None
    try:
        # If ipyparallel loaded the file, it would ignore an error in it and use its defaults.
        config = PyFileConfigLoader(_CONFIGURATION, path=folder).load_config()
        return Cluster(config=config, load_profile=False, profile_dir=folder, cluster_id="nbgpu")
    except ConfigFileNotFound:
        raise ConfigError(
            f"ipython_profile={name!r} has no {_CONFIGURATION} in {folder}. `ipython profile create --parallel {name}` makes one"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"ipython_profile={name!r}: {Path(folder) / _CONFIGURATION} cannot be used: {type(error).__name__}: {error}"
        ) from error
