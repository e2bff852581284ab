"""Finding a way for the ranks to talk: the best one that works, and never a silent step down.

Each way is tried by the engines themselves, which form their group over it and add up a number. What a failed
NCCL leaves in a process (a broken CUDA context, variables that it reads once only, a thread that hangs in the
driver) cannot be mended there, so that the next way is tried by new engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbgpu.client.engines.ranks import Ranks
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError, RankError
from nbgpu.machine.transports import ChosenTransport, Transport


def find_transport(ranks: Ranks, transports: Sequence[Transport], config: ClusterConfig) -> ChosenTransport:
    """Forms the first group over the first way that works.

    Raises:
        ClusterError: none works, or the one that was named does not.
        ConfigError: a rank cannot do what the settings ask for.
    """
    failed: dict[str, str] = {}
    for transport in transports:
        ranks.prepare_for(transport, anew=bool(failed))
        timeout_s = config.probe_timeout_s if transport.backend == "nccl" else config.start_timeout_s
        try:
            return ChosenTransport(transport, tuple(ranks.join(timeout_s)), failed)
        except RankError as error:
            wrong = [failure for failure in error.failures if failure.error_type == "ConfigError"]
            if wrong:
                raise ConfigError(wrong[0].message) from None
            failed[transport.name] = str(error)
        except ClusterError as error:
            failed[transport.name] = str(error)
        ranks.require_reachable()
    told = "\n".join(f"{name}: {why}" for name, why in failed.items())
    advice = "" if config.backend == "auto" else "\nbackend='auto' tries other ways, too"
    raise ClusterError(f"the ranks cannot talk to each other. nbgpu doctor says more.\n{told}{advice}")
