"""The hosts of a cluster with `launcher="hosts"`: they dial in, started by a person or by an
IPython profile."""

from __future__ import annotations

from pathlib import Path

from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.profile_launcher import ProfileLauncher
from nbgpu.config import ClusterConfig


class NoLauncher(Launcher):
    """Starts nothing: somebody starts the hosts, and they dial in."""

    @classmethod
    def create(cls, config: ClusterConfig) -> Launcher:
        """Leave the settings with an `ipython_profile` to ipyparallel's launchers."""
        return ProfileLauncher(config) if config.ipython_profile else cls(config)

    def start(self, join_file: Path, interface: str) -> None:
        """Tell the person what to start on the hosts. The start waits for them meanwhile."""
        self.tell(
            f"waiting for {self._config.num_hosts} host(s), which reach this one at {interface}. On each of them: nbgpu "
            f"host --join {join_file}"
        )

    def why_late(self) -> str:
        """Say how a host dials in."""
        return (
            "A host dials in with `nbgpu host --join FILE`, which says there where it looks for the cluster"
        )

    def when_lost(self) -> str:
        """Each host is started by hand."""
        return "%nbgpu restart starts it again, when each host has to dial in once more"
