"""The launcher of `launcher="hosts"`: a person or an IPython profile starts the host program on each host."""

from __future__ import annotations

from pathlib import Path

from nbgpu.client.launchers.launcher import Launcher
from nbgpu.client.launchers.profile_launcher import ProfileLauncher
from nbgpu.config import ClusterConfig


class NoLauncher(Launcher):
    """Starts nothing, and tells the person which command to run on the hosts."""

    @classmethod
    def create(cls, config: ClusterConfig) -> Launcher:
        """Return the launcher of the `ipython_profile` if the settings name one, and this one otherwise."""
        return ProfileLauncher(config) if config.ipython_profile else cls(config)

    def start(self, join_file: Path, interface: str) -> None:
        """Show the command to run on each host. The start of the cluster then waits for the hosts."""
        self.tell(
            f"waiting for {self._config.num_hosts} host(s), which reach this one at {interface}. On each of them: nbgpu "
            f"host --join {join_file}"
        )

    def why_late(self) -> str:
        """Say with which command a host dials in."""
        return (
            "A host dials in with `nbgpu host --join FILE`, which says there where it looks for the cluster"
        )

    def when_lost(self) -> str:
        """Say that a restart needs the command on each host once more."""
        return "%nbgpu restart starts it again, when each host has to dial in once more"
