"""The settings of a rank, which the client sends to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbgpu.machine.numa import Binding


@dataclass(frozen=True)
class RankSpec:
    """A rank's place in the group, its device, and its settings."""

    rank: int
    world_size: int
    host: str
    """The name of its host, unique in the cluster."""
    local_rank: int
    local_world_size: int
    """The number of ranks on its host."""
    host_number: int
    """The number of the rank's host among the hosts that have ranks, from 0 on."""
    num_hosts: int
    """The number of hosts that have ranks."""
    interface: str
    """The network interface to ranks of other hosts; empty if all are on one host."""
    backend: str
    transport: str
    """The name of the cluster's transport, as in `nbgpu.machine.transports`."""
    device: str
    """'cuda:N' among the GPUs that the cluster chose, or 'cpu'."""
    visible_gpus: str
    """The UUIDs of these GPUs, separated by commas."""
    described: Mapping[str, Any]
    """The fields of the device's `records.Device`."""
    folder: str
    """The cluster's folder on this host; only the user can enter it."""
    store: str
    """The address of the server of the store in which the ranks meet."""
    store_keys: str
    """The file with the keys of that server, a `protocol.meeting.MeetingPlace`."""
    binding: Binding
    """The cores to which the rank's process is bound."""
    threads: int
    """CPU threads for torch's operators on this rank."""
    collective_timeout_s: float
    memory_limit_bytes: int | None
    """The most memory that the rank may take on its device; None for no limit."""
    cell_seed: int | None
    """The seed of the random numbers that cells draw, as in `ClusterConfig`."""
    link: Mapping[str, Any] | None
    """The fields of the simulated `machine.links.Link`; None for the link that is there."""
    clock_ahead_s: float
    """How far the clock of the rank's host is ahead of that of the notebook's host, in seconds."""
    slow_factor: float
    """The factor by which this rank's work is slowed down; 1 for a rank like the others."""
    simulated: str
    """The simulated link and slow ranks of the cluster in words; empty for none."""
