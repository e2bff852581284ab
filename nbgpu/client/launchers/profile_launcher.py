"""The hosts of a cluster with an `ipython_profile`: one of ipyparallel's launchers starts them, as that
profile's configuration says.

So PBS, LSF, SGE, HTCondor, MPI and what a site has written for itself are launchers too: where they would
start `ipengine`, they start a host's program.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import shlex
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from nbgpu.client.launchers.launcher import Launcher, print_at_once
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine.files import write_whole
from nbgpu.machine.signals import uninterrupted

_CONFIGURATION = "ipcluster_config.py"
_NUM_LINES = 20

_log = logging.getLogger("nbgpu.cluster")


class ProfileLauncher(Launcher):
    """Has ipyparallel's launcher of a profile start a host's program on each host.

    Args:
        config: the settings of the cluster.
        tell: a function that shows a line to the person who waits for the start.

    Raises:
        ConfigError: there is no such profile, its configuration cannot be read, or its launcher starts only
            ipyparallel's own programs.
    """

    def __init__(self, config: ClusterConfig, tell: Callable[[str], None] = print_at_once) -> None:
        super().__init__(config, tell)
        options = {name: str(value) for name, value in config.options_of_launcher.items()}
        self._python = options.get("python", sys.executable)
        shared = Path(options.get("folder", Path.home())).expanduser().absolute()
        self._folder = shared / f".nbgpu-hosts-{secrets.token_hex(6)}"
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
        file = self._folder / "join.json"
        try:
            (self._folder / "log").mkdir(mode=0o700, parents=True)
            self._folder.chmod(0o700)
            write_whole(file, join_file.read_text(), mode=0o600)
        except OSError as error:
            raise ClusterError(
                f"no folder for the hosts can be made: {error}. launcher_options={{'folder': ...}} names another place, which "
                "all hosts see"
            ) from None
        engines = self._profile.engine_launcher_class(
            parent=self._profile,
            work_dir=str(self._folder),
            profile_dir=str(self._folder),
            cluster_id="nbgpu",
            engine_set_id="hosts",
            engine_cmd=[self._python, "-P", "-m", "nbgpu.engine.process.host", str(file)],
            engine_args=[],
        )
        with uninterrupted():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="nbgpu-profile-launcher", daemon=True
            )
            self._thread.start()
            self._engines = engines
            try:
                started = self._do(lambda: engines.start(self._config.nodes))
            except CalledProcessError as error:
                said = (error.output or b"").decode(errors="replace").strip()
                raise ClusterError(
                    f"{shlex.join(error.cmd)} of {self._name} failed with exit code {error.returncode}"
                    f"{f': {said}' if said else ''}. The script is in {self._folder}"
                ) from None
            except Exception as error:
                raise ClusterError(f"{self._name} could not start the hosts: {error}") from error
        job = f": job {started}" if isinstance(started, str) else ""
        self._tell(
            f"{self._name} of the profile {self._config.ipython_profile} starts {self._config.nodes} host(s){job}"
        )

    def _do(self, call: Callable[[], Any]) -> Any:
        """Call a method of ipyparallel's launcher on the loop's thread; some are coroutines."""
        assert self._loop is not None, "start has made it"

        async def done() -> Any:
            answer = call()
            return await answer if inspect.isawaitable(answer) else answer

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result()

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
        if outputs := getattr(self._engines, "outputs", {}):
            # ipyparallel has read and removed the files of processes that have ended.
            for output in outputs.values():
                written += output.strip().splitlines()
        return "\n".join(["The hosts' output ends with:", *written[-_NUM_LINES:]]) if written else ""

    def when_lost(self) -> str:
        """Say that the launcher starts hosts again."""
        return f"%nbgpu restart has {self._name} start hosts again"

    @uninterrupted()
    def end(self) -> None:
        """Have the launcher end what it has started, and remove its folder."""
        if self._engines is not None and self._engines.state == "running":
            try:
                self._do(self._engines.stop)
            except Exception as error:  # noqa: BLE001 - a site's launcher may raise anything
                # The hosts end with the cluster, and a job that has ended cannot be cancelled.
                _log.info("%s: %s", self._name, error)
        self._engines = None
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
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
