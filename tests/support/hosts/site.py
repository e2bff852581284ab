"""A notebook on one test host, and a cluster on others, which dial in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hosts.far_python import FarPython
from hosts.namespaces import Host, Hosts, wait_until

_NEW = """
import nbgpu
if "cluster" in globals():
    cluster.stop()
cluster = nbgpu.Cluster(launcher="hosts", gpus_per_node=2, gpus="none", interface="eth0", threads_per_rank=1, **{settings!r})
"""
_STOP = """
cluster.stop()
"""
_START = """
import shutil, threading, time

def hand_over():
    while cluster.join_file is None:
        time.sleep(0.01)
    shutil.copy(cluster.join_file, {folder!r} + "/part")
    shutil.move({folder!r} + "/part", {folder!r} + "/join.json")

threading.Thread(target=hand_over).start()
cluster.start()
"""


class Site:
    """A notebook on the host `desk`, and a cluster on all other hosts, with two ranks on each.

    Args:
        made: the hosts.
        folder: a folder that all of them see.
        patience_s: how long one answer of the notebook may take.
        settings: of the cluster, beside those that every one has here.
    """

    def __init__(self, made: Hosts, folder: Path, patience_s: float, **settings: Any) -> None:
        self.hosts = made
        self.folder = folder
        self._patience_s = patience_s
        self._settings = settings
        self.names = [name for name in made if name != "desk"]
        self.notebook = FarPython(made["desk"], patience_s)
        self.dialled: list[subprocess.Popen[Any]] = []
        self.environment_of: dict[str, Mapping[str, str]] = {}
        """More variables of what runs on a host, by its name."""

    @property
    def nodes(self) -> list[Host]:
        """The hosts that have ranks; one that was off is another since."""
        return [self.hosts[name] for name in self.names]

    def start(self, **settings: Any) -> None:
        """Start a cluster in place of the one that may be there, with more settings; all hosts dial in."""
        given = {"nodes": len(self.names), **self._settings, **settings}
        self._start(_NEW.format(settings=given))

    def restart(self) -> None:
        """Stop the cluster and start it again, as %nbgpu restart does; all hosts dial in."""
        self._start(_STOP)

    def _start(self, before: str) -> None:
        join_file = self.folder / "join.json"
        join_file.unlink(missing_ok=True)
        self.notebook.send(before + _START.format(folder=str(self.folder)))
        wait_until(join_file.exists, self._patience_s, lambda: "there is no join file")
        for name in self.names:
            self.dial_in(name)
        failed, said = self.notebook.answer()
        assert not failed, f"{failed}: {said}\n{self.logs()}"
        assert "nbgpu host --join" in said

    def dial_in(self, name: str) -> None:
        """Have a host dial in, and return at once."""
        command = [sys.executable, "-m", "nbgpu.cli", "host", "--join", str(self.folder / "join.json")]
        environment = self.environment_of.get(name)
        with (self.folder / f"{name}.log").open("a") as log:
            self.dialled.append(
                self.hosts[name].popen(command, environment=environment, stdout=log, stderr=log)
            )

    def own_pids(self) -> set[int]:
        """The processes by which this one has started programs on the hosts."""
        return {process.pid for process in [self.notebook.process, *self.dialled]}

    def logs(self) -> str:
        """What the hosts have written."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def cell(self, code: str) -> str:
        """What `execute` returns, as text."""
        return self.notebook.run(f"print(cluster.execute({code!r}))")

    def wait_for_all_to_end(self, *nodes: Host) -> None:
        """Wait until no process is left on these hosts."""
        for host in nodes:
            wait_until(
                lambda host=host: not host.pids(), 20, lambda host=host: host.run(["ps", "-ef"]).stdout
            )

    def new_notebook(self) -> None:
        """Open another notebook, after the end of the one before."""
        with self.notebook:
            pass
        self.notebook = FarPython(self.hosts["desk"], self._patience_s)

    def end(self) -> None:
        """End the notebook and what was started on the hosts."""
        with self.notebook:
            pass
        for process in self.dialled:
            process.kill()
            process.wait()
