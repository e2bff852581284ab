"""Finds a transport for the ranks: the best one that works, and never a silent step down.

The engines themselves try each transport: they form their group over it and add up a number. The remains of a
failed NCCL in a process (a broken CUDA context, variables that it reads only once, a thread that hangs in the
driver) cannot be repaired there, so new engines try the next transport.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbgpu.client.engines.ranks import Ranks
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError, RankError
from nbgpu.machine.transports import ChosenTransport, Transport


def find_transport(ranks: Ranks, transports: Sequence[Transport], config: ClusterConfig) -> ChosenTransport:
    """Form the first group over the first transport that works.

    Raises:
        ClusterError: no transport works, or the transport that was named does not.
        ConfigError: a rank cannot do what the settings ask for.
    """
    failed: dict[str, str] = {}
    for transport in transports:
        ranks.prepare_for(transport, with_new_engines=bool(failed))
        timeout_s = config.probe_timeout_s if transport.backend == "nccl" else config.start_timeout_s
        try:
            return ChosenTransport(transport, tuple(ranks.join(timeout_s)), failed, config.simulated)
        except RankError as error:
            wrong = [failure for failure in error.failures if failure.error_type == "ConfigError"]
            if wrong:
                raise ConfigError(wrong[0].message) from None
            failed[transport.name] = str(error)
        except ClusterError as error:
            failed[transport.name] = str(error)
        ranks.require_reachable()
    reasons = "\n".join(f"{name}: {why}" for name, why in failed.items())
    advice = "" if config.backend == "auto" else "\nbackend='auto' tries the other transports, too"
    raise ClusterError(
        f"the ranks cannot communicate with each other. nbgpu doctor says more.\n{reasons}{advice}"
    )
