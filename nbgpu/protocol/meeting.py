"""The protocol between a rank's store and the server in the controller's process through which the ranks
meet, and the file with the server's address.

A request is a message with these frames: the kind of request, the generation of the group, then the arguments
of that kind. Keys and values are bytes, and numbers are written in decimal.
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
"""The most that all generations together may hold."""
OVERHEAD_BYTES = 256
"""The memory that counts for a stored value beside its bytes, so that many small values reach the limit,
too."""
MAX_WAITING = 65_536
"""The most requests that may wait for a key at the same time."""

LEASE_S = 5.0
"""A request that waits for a key is answered with LATER after this time, and is sent again. So the server
forgets the requests of a process that has ended."""


class Ask(bytes, Enum):
    """The kind of a request."""

    SET = b"set"
    """Keys and values in turns."""
    GET = b"get"
    """Patience in ms, then keys; waits until all are there and gives their values."""
    WAIT = b"wait"
    """Patience in ms, then keys; waits until all are there and gives no values."""
    ADD = b"add"
    """A key and a whole number; gives the sum."""
    APPEND = b"append"
    """A key and bytes to add to its value."""
    COMPARE_SET = b"compare"
    """A key, the expected and the desired value; gives the value afterwards."""
    CHECK = b"check"
    """Keys; gives 1 if all are there, else 0."""
    DELETE = b"delete"
    """A key; gives 1 if it was there, else 0."""
    COUNT = b"count"
    """Gives the number of keys."""
    LIST = b"list"
    """Gives the keys."""
    PUSH = b"push"
    """A key and a value for the end of its queue."""
    POP = b"pop"
    """Patience in ms, then a key; waits for a value in its queue, takes it and gives it."""
    LENGTH = b"length"
    """A key; gives the length of its queue."""
    GIVE_UP = b"give-up"
    """Ends this generation and all before it, for everybody."""


class Said(bytes, Enum):
    """The first frame of an answer."""

    DONE = b"done"
    """The request was carried out; its result follows."""
    LATER = b"later"
    """Not all keys are there yet."""
    GIVEN_UP = b"given-up"
    """The generation was given up."""
    REFUSED = b"refused"
    """The request cannot be granted; the reason follows as text."""


@dataclass(frozen=True)
class MeetingPlace:
    """The address of the server, and the keys of CurveZMQ without which it answers nobody."""

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
