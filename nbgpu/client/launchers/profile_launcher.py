"""The hosts of a cluster with an `ipython_profile`: one of ipyparallel's launchers starts them, as that
profile's configuration says.

So PBS, LSF, SGE, HTCondor, MPI and what a site has written for itself are launchers too: where they would
start `ipengine`, they start a host's program.
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
"""For a thread that has nothing to do. One in a command that hangs is left there."""
_POLL_PERIOD_S = 0.05

_log = logging.getLogger("nbgpu.cluster")


class ProfileLauncher(Launcher):
    """Has ipyparallel's launcher of a profile start a host's program on each host.

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
        """ipyparallel's launcher once it has been asked to start the hosts."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """ipyparallel's launchers hear on it that what they have started has ended."""
        self._thread: threading.Thread | None = None

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
            started = self._started(self._ask(lambda: engines.start(self._config.num_hosts)))
        job = f": job {started}" if isinstance(started, str) else ""
        self.tell(
            f"{self._name} of the profile {self._config.ipython_profile} starts {self._config.num_hosts} host(s){job}"
        )

    def _ask(self, call: Callable[[], Any]) -> Future[Any]:
        """Call a method of ipyparallel's launcher, which may be a coroutine, on the loop's thread."""
        assert self._loop is not None, "start has made it"

        async def done() -> Any:
            answer = call()
            return await answer if inspect.isawaitable(answer) else answer

        return asyncio.run_coroutine_threadsafe(done(), self._loop)

    def _started(self, asked: Future[Any]) -> Any:
        """Return what starting has returned. A Stop ends the wait for a command that hangs."""
        give_up_s = time.monotonic() + _START_PATIENCE_S
        while not wait([asked], _POLL_PERIOD_S).done:
            take_interrupt()
            if time.monotonic() > give_up_s:
                raise ClusterError(f"{self._name} has not started the hosts within {_START_PATIENCE_S:g} s")
        error = asked.exception()
        if isinstance(error, CalledProcessError):
            said = (error.output or b"").decode(errors="replace").strip()
            raise ClusterError(
                f"{shlex.join(error.cmd)} of {self._name} failed with exit code {error.returncode}"
                f"{f': {said}' if said else ''}"
            )
        if error is not None:
            raise ClusterError(f"{self._name} could not start the hosts: {error}") from error
        return asked.result()

    def check(self) -> None:
        """Raise ClusterError if all that was started has ended."""
        if self._engines.state == "after":
            said = self._last_lines() or "It has written nothing"
            raise ClusterError(f"what {self._name} has started has ended. {said}")

    def why_late(self) -> str:
        """The end of what the hosts have written."""
        return self._last_lines() or (
            f"The hosts have written nothing to {self._folder / 'log'}: the job may still wait in its queue. Give it longer "
            "with start_timeout_s, and where hosts do not see that folder, launcher_options={'folder': ...} names another "
            "place"
        )

    def _last_lines(self) -> str:
        written = []
        for path in sorted((self._folder / "log").glob("*")):
            written += path.read_text(errors="replace").strip().splitlines()
        # ipyparallel has read and removed the files of processes that have ended.
        for output in getattr(self._engines, "outputs", {}).values():
            written += output.strip().splitlines()
        return "\n".join(["The hosts' output ends with:", *written[-_NUM_LINES:]]) if written else ""

    def when_lost(self) -> str:
        """Say that the launcher starts hosts again."""
        return f"%nbgpu restart has {self._name} start hosts again"

    @uninterrupted()
    def end(self) -> None:
        """Have the launcher end what it has started, and remove its folder."""
        if self._engines is not None and self._engines.state == "running":
            asked = self._ask(self._engines.stop)
            # The hosts end with the cluster in any case, and a job that has ended cannot be cancelled.
            if not wait([asked], _END_PATIENCE_S).done:
                _log.warning("%s has not ended its job within %g s", self._name, _END_PATIENCE_S)
            elif error := asked.exception():
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
    """Return ipyparallel's cluster with the configuration of a profile.

    Raises:
        ConfigError: there is no such profile, or its configuration cannot be read.
    """
    # Here, because they take a while to import and few clusters need them.
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
        # Left to load it, ipyparallel goes on with its defaults where the file has a mistake.
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
