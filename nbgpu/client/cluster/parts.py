"""The parts of a cluster. Each gets the shared state, and the other parts that it calls."""

from __future__ import annotations

from typing import Self

from nbgpu.client.cells.runner import CellRunner
from nbgpu.client.cluster import time_limit
from nbgpu.client.cluster.lifecycle import Lifecycle, require_usable
from nbgpu.client.cluster.resizing import Resizing
from nbgpu.client.engines.host_pool import HostPool
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.launchers.launcher import launcher_of, restored_launcher
from nbgpu.client.runs.manager import RunManager
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.client.variables.store import VariableStore
from nbgpu.config import ClusterConfig
from nbgpu.errors import NoFreeGpuError
from nbgpu.host import enough_ranks
from nbgpu.machine import transports
from nbgpu.machine.transports import ChosenTransport
from nbgpu.planning.host_devices import UNKNOWN
from nbgpu.protocol.records import Device


class ClusterParts:
    """Makes the parts. `Cluster` is their public face, and nbgpu's own modules use them directly."""

    def __init__(self, state: ClusterState, placement_note: str = "") -> None:
        self.state = state
        changes = RankChanges(state)
        self.recovery = Recovery(state, changes)
        self.runs = RunManager(state, self.recovery)
        self.cells = CellRunner(state, self.recovery, self.runs)
        self.variables = VariableStore(state, self.runs)
        self.resizing = Resizing(state, changes, self.recovery)
        self.lifecycle = Lifecycle(
            state, self.recovery, self.runs, self.cells, self.variables, placement_note
        )

    @classmethod
    def for_start(cls, config: ClusterConfig) -> Self:
        """Choose the devices of a cluster that is to be started.

        Raises:
            ConfigError: a setting is not valid beside others, or a GPU is named that is not there.
            NoFreeGpuError: too few GPUs are free, and the settings do not say to wait.
        """
        time_limit.require_limit(config)
        config, placement_note = enough_ranks.placed(config)
        pool = HostPool(config, launcher_of(config))
        # The devices of other hosts are known once these have dialled in.
        chosen: tuple[Device, ...] = ()
        if config.is_local:
            try:
                chosen = gpu_choice.choose(config)
            except NoFreeGpuError:
                if not config.wait:
                    raise
        require_usable(config, chosen)
        best = transports.candidates(config, chosen or UNKNOWN)[0]
        transport = ChosenTransport(best, simulated=config.simulated)
        return cls(ClusterState(config, pool, chosen, transport), placement_note)

    @classmethod
    def from_entry(cls, entry: registry.Entry) -> Self:
        """Make the parts for a cluster that another process has started."""
        # A notebook that ended while its cluster was growing may have taken more GPUs than there are ranks.
        used = entry.devices[: len(entry.assignment.engines)]
        launcher = restored_launcher(entry.config, entry.job, entry.launched)
        pool = HostPool(entry.config, launcher, entry.most_ranks)
        return cls(ClusterState(entry.config, pool, used, entry.chosen_transport, entry=entry))
