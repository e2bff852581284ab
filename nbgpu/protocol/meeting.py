"""The protocol of the rendezvous store: a rank's `Store` of torch.distributed is a client of a server in the
controller's process. The file with the server's address is defined here, too.

A request is a ZeroMQ message with the frames: kind of request, generation of the process group, and the
arguments of that kind. Keys and values are bytes, and numbers are decimal text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

MEETING = "meeting.json"
"""The file in the cluster's folder that holds a `MeetingPlace`; only the user can read it."""

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 16 * 2**20
"""gloo stores the addresses of all its connections in one value: 200 KiB for 1024 ranks."""
MAX_STORED_BYTES = 256 * 2**20
"""The limit for the stored values of all generations together."""
OVERHEAD_BYTES = 256
"""The memory that is counted for a stored value in addition to its bytes, so that many small values reach the
limit, too."""
MAX_WAITING = 65_536
"""The largest number of requests that may wait for a key at the same time."""

LEASE_S = 5.0
"""A request that waits for a key is answered with LATER after this time, and is sent again, so that the
server forgets the requests of processes that have ended."""


class Ask(bytes, Enum):
    """The kind of a request. Each member describes the arguments, and then the result."""

    SET = b"set"
    """Alternating keys and values; no result."""
    GET = b"get"
    """Timeout in ms, then keys; waits until all keys exist, and returns their values."""
    WAIT = b"wait"
    """Timeout in ms, then keys; waits until all keys exist; no result."""
    ADD = b"add"
    """A key and an integer to add to its value; returns the sum."""
    APPEND = b"append"
    """A key and bytes to append to its value; no result."""
    COMPARE_SET = b"compare"
    """A key, the expected and the desired value; returns the value afterwards."""
    CHECK = b"check"
    """Keys; returns 1 if all exist, else 0."""
    DELETE = b"delete"
    """A key; returns 1 if it existed, else 0."""
    COUNT = b"count"
    """Returns the number of keys."""
    LIST = b"list"
    """Returns the keys."""
    PUSH = b"push"
    """A key and a value to append to the key's queue; no result."""
    POP = b"pop"
    """Timeout in ms, then a key; waits for a value in the key's queue, removes it and returns it."""
    LENGTH = b"length"
    """A key; returns the length of the key's queue."""
    GIVE_UP = b"give-up"
    """Ends this generation and all earlier ones for all ranks."""


class Said(bytes, Enum):
    """The first frame of an answer."""

    DONE = b"done"
    """The request succeeded; its result follows."""
    LATER = b"later"
    """Not all keys exist yet."""
    GIVEN_UP = b"given-up"
    """The generation was given up."""
    REFUSED = b"refused"
    """The request is refused; the reason follows as text."""


@dataclass(frozen=True)
class MeetingPlace:
    """The address of the server, and the CurveZMQ keys that its clients need."""

    address: str
    """The server's address, such as 'tcp://127.0.0.1:40001'."""
    server_public_key: str
    public_key: str
    """The public key of the ranks, which share one pair of keys."""
    secret_key: str

    def as_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, file: Path) -> MeetingPlace:
        """Read the file."""
        return cls(**json.loads(file.read_text()))
