"""The transports over which the ranks of a cluster may communicate, and the order in which they are tried."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Final, Literal

from packaging.version import Version

from nbgpu.errors import ConfigError
from nbgpu.machine.devices import is_part
from nbgpu.protocol.records import Device

if TYPE_CHECKING:
    from nbgpu.config import ClusterConfig

MULTI_RANK: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own environment variable, with which several ranks may share a GPU."""
_SHARES_GPUS, _SHARES_PARTS = (2, 30), (2, 31)
"""The first versions of NCCL that support MULTI_RANK, for whole GPUs and for parts of a GPU (MIG)
(https://github.com/NVIDIA/nccl/issues/1716)."""
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")

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
    """The transport that a cluster uses, with the reasons for the choice."""

    transport: Transport
    settings: tuple[str, ...] = ()
    """The environment variables that were set for it, as 'NAME=value'."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The transports that were tried before, each with the reason why it did not work."""
    simulated: str = ""
    """A description of the simulated link and slow ranks; empty for none."""

    @property
    def name(self) -> str:
        """The transport with its simulated link and slow ranks: 'gloo', or 'gloo, simulated link 10GbE'."""
        return f"{self.transport.name}, {self.simulated}" if self.simulated else self.transport.name

    def describe(self) -> str:
        """Return the choice as text, such as 'gloo (nccl and nccl in safe mode failed)', with the environment
        variables that were set."""
        notes = []
        if self.failed:
            notes.append(f"{' and '.join(self.failed)} failed")
        if self.settings:
            notes.append(f"with {' '.join(self.settings)}")
        return f"{self.name} ({'; '.join(notes)})" if notes else self.name


_NCCL = Transport("nccl", "nccl")
_NCCL_SAFE = Transport(NCCL_SAFE, "nccl")
_GLOO = Transport("gloo", "gloo")
_SINGLE = Transport(SINGLE, "gloo")


def candidates(config: ClusterConfig, chosen: Sequence[Device]) -> tuple[Transport, ...]:
    """Return the transports to try in this order until one works. If the settings name a backend, it is the
    only candidate.

    Raises:
        ConfigError: the settings name NCCL, which these devices cannot use.
    """
    nccl = (_NCCL_SAFE,) if config.nccl_safe else (_NCCL, _NCCL_SAFE)
    obstacle = _obstacle_to_nccl(chosen)
    if config.backend == "nccl":
        if obstacle:
            raise ConfigError(f"backend = 'nccl' {obstacle}. Give backend='gloo', or fewer ranks")
        return nccl[:1]
    if config.backend in ("gloo", "hierarchical_copy"):
        return (_GLOO,)
    # One rank alone is the last resort, if no two ranks can communicate.
    return (*(() if obstacle else nccl), _GLOO, _SINGLE)


def _obstacle_to_nccl(chosen: Sequence[Device]) -> str:
    """Return why these devices cannot use NCCL, as the end of a sentence that begins with NCCL; empty if they
    can.

    Newer versions of NCCL have experimental support for several ranks on one GPU and for parts of a GPU
    (MIG), which must be enabled by the environment variable MULTI_RANK.
    """
    gpus = [device.uuid for device in chosen if device.kind == "cuda"]
    has_parts = any(map(is_part, chosen))
    if gpus and len(set(gpus)) == len(gpus) and not has_parts:
        return ""
    obstacle = (
        f"needs a whole GPU for each rank, and {len(chosen)} rank(s) have {len(set(gpus))} "
        f"{'part(s) of a GPU' if has_parts else 'GPU(s)'}"
    )
    if len(gpus) < len(chosen):
        return obstacle
    required = _SHARES_PARTS if has_parts else _SHARES_GPUS
    sharing = "parts of a GPU" if has_parts else "a GPU for several ranks"
    installed = installed_nccl()
    if installed is not None and installed < required:
        here, first = ".".join(map(str, installed)), ".".join(map(str, required))
        return f"{obstacle}: NCCL {here} is installed here, and {first} is the first to take {sharing}"
    if os.environ.get(MULTI_RANK) == "1":
        return ""
    return f"{obstacle}: NCCL takes {sharing} only as an experiment, with {MULTI_RANK}=1 in the environment"


def installed_nccl() -> tuple[int, ...] | None:
    """Return the version of the NCCL that pip has installed with torch; None if NCCL was installed in another
    way."""
    for package in _NCCL_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return Version(metadata.version(package)).release
    return None
