"""The data types that hosts which connect to a cluster ("dial in") exchange with the notebook's side."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIRST_NUMBER = 1000
"""The smallest ipyparallel id of a host's engine; smaller ids are for the engines of ranks."""
_NUM_NUMBERS = 2**30
"""Random numbers from so many are unique in practice."""


def new_number() -> int:
    """Return a random, unique id for a host's engine."""
    return FIRST_NUMBER + secrets.randbelow(_NUM_NUMBERS)


@dataclass(frozen=True)
class JoinFile:
    """All that a host needs to connect to the cluster. The file contains the cluster's keys, so only the user
    may read it."""

    engine_connection: Mapping[str, Any]
    """The content of ipyparallel's connection file for engines."""
    meeting: Mapping[str, Any]
    """The fields of the `MeetingPlace`."""
    environment: Mapping[str, str]
    """Environment variables of the engines, in addition to the host's."""
    interface: str
    """The network interface of the notebook's host on which the controller listens."""
    working_folder: str = ""
    """The notebook's working folder, which is also the ranks' working folder if it exists on their host."""

    def as_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, file: Path) -> JoinFile:
        """Read the file."""
        return cls(**json.loads(file.read_text()))


@dataclass(frozen=True)
class JoinedHost:
    """A connected host of a cluster, as it is stored for a process that attaches to the cluster later."""

    name: str
    """The host's name, unique in the cluster."""
    engine: int
    """The ipyparallel id of the host's engine."""
    description: Mapping[str, Any]
    """The fields of its `HostDescription`."""
    clock_ahead_s: float = 0.0
    """The seconds by which the host's clock is ahead of the clock of the notebook's host. The host's ranks
    correct their times by this."""


@dataclass(frozen=True)
class HostDescription:
    """The facts that a host reports when it has connected."""

    name: str
    interface: str
    """The network interface through which the host reaches the controller."""
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
    """Why the host cannot fulfil the cluster's settings; empty if it can."""
