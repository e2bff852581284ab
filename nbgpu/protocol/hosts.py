"""The types by which hosts that dial in and the notebook's side know each other."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIRST_NUMBER = 1000
"""ipyparallel's numbers of hosts' engines begin here; those below are for the engines of ranks."""
_NUM_NUMBERS = 2**30
"""So many numbers to draw from that two hosts hardly draw the same."""


def new_number() -> int:
    """A number for a host's engine, which no other host of the cluster has."""
    return FIRST_NUMBER + secrets.randbelow(_NUM_NUMBERS)


@dataclass(frozen=True)
class JoinFile:
    """All that a host needs to dial in. It has the keys of the cluster: only the user may read it."""

    engine_connection: Mapping[str, Any]
    """ipyparallel's file for engines."""
    meeting: Mapping[str, Any]
    """The fields of the `MeetingPlace`."""
    environment: Mapping[str, str]
    """The variables of the engines beside the host's own."""
    interface: str
    """The interface of the notebook's host at which the controller listens."""
    working_folder: str = ""
    """The notebook's working folder. The ranks work in the same folder if their host has it."""

    def as_json(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, file: Path) -> JoinFile:
        """Read the file."""
        return cls(**json.loads(file.read_text()))


@dataclass(frozen=True)
class JoinedHost:
    """A host of a cluster, as the next owner of the cluster must know it."""

    name: str
    """Unique in the cluster."""
    engine: int
    """ipyparallel's number of its engine."""
    description: Mapping[str, Any]
    """The fields of its `HostDescription`."""
    clock_ahead_s: float = 0.0
    """The seconds by which the host's clock is ahead of the clock of the notebook's host; its ranks correct
    theirs by this."""


@dataclass(frozen=True)
class HostDescription:
    """The facts about a host that it sends when it has dialled in."""

    name: str
    interface: str
    """The interface through which it reaches the controller."""
    address: str
    folder: str
    """The cluster's folder on that host."""
    meeting_file: str
    versions: Mapping[str, str | None]
    """The versions of Python and of the packages that must be the same on all hosts."""
    num_cores: int
    numa_nodes: Mapping[str, str]
    """The cores of the host's NUMA nodes to which ranks may be bound (`machine.numa.bindable`)."""
    devices: tuple[Mapping[str, Any], ...]
    """The device of each rank of the host, as the fields of `Device`."""
    problem: str = ""
    """A reason why the host cannot honour the cluster's settings; empty if it can."""
