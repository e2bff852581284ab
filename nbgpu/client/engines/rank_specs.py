"""Makes the `RankSpec` of each rank (engine/process/rank_spec.py): its place in the group and its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from nbgpu.client.engines.host_pool import HostPool
from nbgpu.config import ClusterConfig
from nbgpu.machine import devices, numa
from nbgpu.machine.transports import SINGLE, Transport
from nbgpu.protocol.meeting import MeetingPlace
from nbgpu.protocol.records import Device


def rank_specs(
    config: ClusterConfig,
    chosen: Sequence[Device],
    transport: Transport,
    pool: HostPool,
    host_name: Callable[[int], str],
) -> list[dict[str, Any]]:
    """Return the spec of each rank, as the arguments of `RankSpec`.

    Args:
        config: the cluster's settings.
        chosen: the device of each rank. The transport `SINGLE` uses only the first one.
        transport: the transport between the ranks.
        pool: the hosts of the cluster, whose controller runs.
        host_name: returns the name of a rank's host.
    """
    hosts = [host_name(rank) for rank in range(len(chosen))]
    world_size = 1 if transport.name == SINGLE else len(chosen)
    hosts_with_ranks = list(dict.fromkeys(hosts[:world_size]))
    link = config.simulated_link
    meeting = MeetingPlace.read(pool.processes.meeting_file)
    specs = []
    for rank, device in enumerate(chosen[:world_size]):
        place = pool.place(hosts[rank])
        # A process sees only the devices of its own host.
        ranks_here = [other for other in range(world_size) if hosts[other] == hosts[rank]]
        devices_here = [chosen[other] for other in range(len(chosen)) if hosts[other] == hosts[rank]]
        bound = numa.binding(place.numa_nodes if config.bind_cores else {}, device, devices_here)
        specs.append(
            {
                "rank": rank,
                "world_size": world_size,
                "host": place.name,
                "local_rank": ranks_here.index(rank),
                "local_world_size": len(ranks_here),
                "host_number": hosts_with_ranks.index(hosts[rank]),
                "num_hosts": len(hosts_with_ranks),
                "interface": place.interface,
                "backend": transport.backend,
                "transport": transport.name,
                "device": devices.torch_name(device, devices_here),
                "visible_gpus": devices.visible_gpus(devices_here),
                "described": asdict(device),
                "folder": place.folder,
                "store": meeting.address,
                "store_keys": place.meeting_file,
                "binding": bound,
                "threads": config.threads_for(len(ranks_here), place.num_cores, bound.share),
                "collective_timeout_s": config.collective_timeout_s,
                "memory_limit_bytes": devices.memory_limit_bytes(config, device, devices_here),
                "cell_seed": config.cell_seed,
                "link": asdict(link) if link is not None else None,
                "clock_ahead_s": place.clock_ahead_s,
                "slow_factor": config.slow_factors.get(rank, 1.0),
                "simulated": config.simulated,
            }
        )
    return specs
