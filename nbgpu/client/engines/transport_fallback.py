"""Finds the best transport over which the ranks can form a group, and reports those that failed.

The engines themselves try a transport: they form their group over it and run an all_reduce. What a failed
NCCL leaves in a process (a broken CUDA context, variables that NCCL reads only once, a thread that hangs in
the driver) cannot be repaired there, so new engines try the next transport.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from nbgpu.client.engines.ranks import Ranks
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError, RankError
from nbgpu.machine.gpus import readings
from nbgpu.machine.gpus.readings import DeviceMonitor
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.text.ranks import count_of_ranks


def find_transport(ranks: Ranks, transports: Sequence[Transport], config: ClusterConfig) -> ChosenTransport:
    """Form the first group over the first transport that works.

    Raises:
        ClusterError: no transport works, or the one that the settings name does not.
        ConfigError: a rank cannot do what the settings ask for.
    """
    failed: dict[str, str] = {}
    untried = list(transports)
    has_tried = False
    while untried:
        transport = untried.pop(0)
        ranks.assign_engines(transport, with_new_engines=has_tried)
        has_tried = True
        timeout_s = config.probe_timeout_s if transport.backend == "nccl" else config.start_timeout_s
        try:
            return ChosenTransport(transport, tuple(ranks.join(timeout_s)), failed, config.simulated)
        except RankError as error:
            # Another transport does not help against a wrong setting.
            refusals = [failure for failure in error.failures if failure.error_type == "ConfigError"]
            if refusals:
                raise ConfigError(refusals[0].message) from None
            failed[transport.name] = str(error)
        except ClusterError as error:
            failed[transport.name] = str(error)
        ranks.require_reachable()
        # One GPU that hangs makes NCCL fail on all ranks: without it the same transport may work.
        if transport.backend == "nccl" and (notice := _leave_out_stuck_gpus(ranks)):
            warnings.warn(f"{transport.name} failed: {failed.pop(transport.name)}\n{notice}", stacklevel=4)
            untried.insert(0, transport)
    reasons = "\n".join(f"{name}: {error}" for name, error in failed.items())
    advice = "" if config.backend == "auto" else "\nbackend='auto' tries the other transports, too"
    raise ClusterError(
        f"the ranks cannot communicate with each other. nbgpu doctor says more.\n{reasons}{advice}"
    )


def _leave_out_stuck_gpus(ranks: Ranks) -> str:
    """End the ranks, and drop those whose GPUs still compute although no process is left on them.

    Returns:
        A message about the GPUs that were left out; empty if none was. If all of them hang, none is left out.
    """
    if not ranks.pids_here:
        return ""  # the driver of another host cannot be asked here
    with DeviceMonitor() as monitor:
        uuids = {device.uuid for device in ranks.devices} & readings.gpus_with_processes(monitor)
        ranks.end(range(len(ranks)))
        busy = {device.uuid: device for device in readings.still_busy(monitor, uuids)}
    ranks_on_busy = [rank for rank, device in enumerate(ranks.devices) if device.uuid in busy]
    if not ranks_on_busy or len(ranks_on_busy) == len(ranks):
        return ""
    ranks.drop(ranks_on_busy)
    return _stuck_gpus_notice([f"GPU {d.index} ({d.uuid})" for d in busy.values()], len(ranks))


def _stuck_gpus_notice(gpus: Sequence[str], num_ranks: int) -> str:
    """Return a message about GPUs that hang. The cluster goes on without them, with this many ranks."""
    hang, them = "still computes, and has no process: it hangs", "it"
    if len(gpus) > 1:
        hang, them = "still compute, and have no process: they hang", "them"
    return (
        f"{' and '.join(gpus)} {hang}. The cluster goes on without {them}, with {count_of_ranks(num_ranks)}. Resetting "
        f"{them} (nvidia-smi --gpu-reset) or the host brings {them} back"
    )
