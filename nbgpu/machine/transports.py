"""The transports over which the ranks of a cluster may communicate, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from nbgpu.errors import ConfigError
from nbgpu.machine.devices import is_part
from nbgpu.protocol.records import Device

if TYPE_CHECKING:
    from nbgpu.config import ClusterConfig

NCCL_SAFE: Final = "nccl in safe mode"
SINGLE: Final = "single"


@dataclass(frozen=True)
class Transport:
    """A way for ranks to communicate."""

    name: Literal["nccl", "nccl in safe mode", "gloo", "single"]
    backend: Literal["nccl", "gloo"]
    """The backend of torch.distributed."""


@dataclass(frozen=True)
class ChosenTransport:
    """The transport that a cluster uses, and why it uses that one."""

    transport: Transport
    settings: tuple[str, ...] = ()
    """The environment variables that were set for it, as 'NAME=value'."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The transports that were tried before, each with the reason why it did not work."""
    simulated: str = ""
    """The simulated link and slow ranks, in words; empty for none."""

    @property
    def name(self) -> str:
        """The transport and what is simulated on it: 'gloo', or 'gloo, simulated link 10GbE'."""
        return f"{self.transport.name}, {self.simulated}" if self.simulated else self.transport.name

    def describe(self) -> str:
        """The choice in words: 'gloo', or 'gloo (nccl and nccl in safe mode failed)', or with the variables
        that were set."""
        notes = [
            *([f"{' and '.join(self.failed)} failed"] if self.failed else []),
            *([f"with {' '.join(self.settings)}"] if self.settings else []),
        ]
        return f"{self.name} ({'; '.join(notes)})" if notes else self.name


_NCCL = Transport("nccl", "nccl")
_NCCL_SAFE = Transport(NCCL_SAFE, "nccl")
_GLOO = Transport("gloo", "gloo")
_SINGLE = Transport(SINGLE, "gloo")


def candidates(config: ClusterConfig, chosen: Sequence[Device]) -> tuple[Transport, ...]:
    """The transports to try, in this order, until one works. A backend that the settings name is the only
    candidate.

    Raises:
        ConfigError: the settings name NCCL, and a rank has no GPU of its own.
    """
    gpus = [d.uuid for d in chosen if d.kind == "cuda"]
    # NCCL supports neither two ranks on one GPU nor a part of a GPU that is split (MIG).
    own_gpu_each = bool(gpus) and len(set(gpus)) == len(gpus) and not any(map(is_part, chosen))
    nccl = (_NCCL_SAFE,) if config.nccl_safe else (_NCCL, _NCCL_SAFE)
    if config.backend == "nccl":
        if not own_gpu_each:
            raise ConfigError(
                f"backend = 'nccl' needs a whole GPU for each rank, and {len(chosen)} rank(s) have {len(set(gpus))} "
                "GPU(s). Give backend='gloo', or fewer ranks"
            )
        return nccl[:1]
    if config.backend in ("gloo", "hierarchical_copy"):
        return (_GLOO,)
    return (*(nccl if own_gpu_each else ()), _GLOO, _SINGLE)
