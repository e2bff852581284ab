"""The rendezvous of the ranks: a key-value store like torch's TCPStore, on a thread of the controller.

It runs in the controller and not in the notebook's kernel, which may hold its GIL for minutes, nor in a rank,
which may die. Each generation of the process group has its own keys. Once a generation is given up, its keys
are dropped, the requests that wait in it are answered at once, and all later ones are refused.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from nbgpu.machine.files import write_whole
from nbgpu.protocol.meeting import (
    LEASE_S,
    MAX_KEY_BYTES,
    MAX_STORED_BYTES,
    MAX_VALUE_BYTES,
    MAX_WAITING,
    MEETING,
    OVERHEAD_BYTES,
    Ask,
    MeetingPlace,
    Said,
)

_log = logging.getLogger("nbgpu.meeting")

Answer = Sequence[bytes]
Send = Callable[[bytes, Answer], bool]
"""Sends an answer to a client; returns whether the client is still connected."""

_DOMAIN = "nbgpu"
_WAITING_KINDS = (Ask.GET, Ask.WAIT, Ask.POP)


class _RefusedError(Exception):
    """A request that cannot be granted; the text says why."""


@dataclass(eq=False)
class _Waiting:
    """A request that waits until all of its keys are stored."""

    client: bytes
    """The ZeroMQ identity of the sender."""
    kind: Ask
    keys: Sequence[bytes]
    until_mono_s: float
    """The client gets the answer LATER at this time."""
    missing: set[bytes] = field(default_factory=set)
    """The keys that are not stored yet."""


class _Generation:
    """The values and queues that the ranks of one generation have stored, and the requests that wait."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.num_bytes = 0
        # Dicts serve as ordered sets: who has waited longest is answered first.
        self.waiting: dict[_Waiting, None] = {}
        self._waiting_for: dict[bytes, dict[_Waiting, None]] = {}

    def growth_bytes(self, key: bytes, value: bytes) -> int:
        """How much larger the store becomes with this value, which replaces the key's present one."""
        before = self.values.get(key)
        return _size_bytes(key, value) - (0 if before is None else _size_bytes(key, before))

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value."""
        self.num_bytes += self.growth_bytes(key, value)
        self.values[key] = value

    def delete(self, key: bytes) -> bool:
        """Delete a value; return whether it was there."""
        before = self.values.pop(key, None)
        if before is not None:
            self.num_bytes -= _size_bytes(key, before)
        return before is not None

    def push(self, key: bytes, value: bytes) -> None:
        """Put a value at the end of a queue."""
        self.num_bytes += _size_bytes(key, value)
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: bytes) -> bytes:
        """Take the first value of a queue, which is not empty."""
        value = self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]
        self.num_bytes -= _size_bytes(key, value)
        return value

    def push_back(self, key: bytes, value: bytes) -> None:
        """Undo `pop`."""
        self.num_bytes += _size_bytes(key, value)
        self.queues.setdefault(key, deque()).appendleft(value)

    def has(self, kind: Ask, key: bytes) -> bool:
        """Whether a key exists for this kind of request: GET reads values, POP takes from queues, and WAIT
        and CHECK accept both, as in torch's own stores."""
        in_values = kind is not Ask.POP and key in self.values
        return in_values or (kind is not Ask.GET and key in self.queues)

    def wait(self, request: _Waiting) -> None:
        """Add a request that waits for the keys in its `missing`."""
        self.waiting[request] = None
        for key in request.missing:
            self._waiting_for.setdefault(key, {})[request] = None

    def forget(self, request: _Waiting) -> None:
        """Remove a waiting request."""
        self.waiting.pop(request, None)
        for key in request.missing:
            waiting = self._waiting_for.get(key, {})
            waiting.pop(request, None)
            if not waiting:
                self._waiting_for.pop(key, None)

    def take_complete(self, key: bytes) -> list[_Waiting]:
        """Remove and return the requests whose last missing key is this one, which was just stored."""
        woken = []
        for request in self._waiting_for.pop(key, {}):
            request.missing.discard(key)
            if not request.missing:
                del self.waiting[request]
                woken.append(request)
        return woken


class Meeting:
    """The store itself: takes requests and sends answers, without any sockets. Use it from one thread.

    Args:
        send: sends an answer to a client.
        clock_s: the monotonic clock, in seconds.
    """

    def __init__(self, send: Send, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock_s = clock_s
        self._generations: dict[int, _Generation] = {}
        self._given_up = -1
        """The number of the newest generation that was given up, as all earlier ones are; -1 for none."""
        self.next_expiry_mono_s = math.inf
        """No request that waits has to be answered before this time."""

    @property
    def num_bytes(self) -> int:
        """The size of everything that is stored."""
        return sum(generation.num_bytes for generation in self._generations.values())

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a key."""
        return sum(len(generation.waiting) for generation in self._generations.values())

    def receive(self, client: bytes, frames: Sequence[bytes]) -> None:
        """Take a request and answer it: at once, or once its keys are stored."""
        try:
            answer = self._answer(client, frames)
        except _RefusedError as refused:
            answer = [Said.REFUSED.value, str(refused).encode()]
        except (ValueError, IndexError):
            answer = [Said.REFUSED.value, b"the request is not one that nbgpu sends"]
        if answer is not None:
            self._send(client, answer)

    def expire(self) -> None:
        """Answer LATER to the requests whose time is over. Call this at `next_expiry_mono_s`."""
        now_s = self._clock_s()
        if now_s < self.next_expiry_mono_s:
            return
        ends = [math.inf]
        for generation in self._generations.values():
            for request in list(generation.waiting):
                if request.until_mono_s <= now_s:
                    generation.forget(request)
                    self._send(request.client, [Said.LATER.value])
                else:
                    ends.append(request.until_mono_s)
        self.next_expiry_mono_s = min(ends)

    def _answer(self, client: bytes, frames: Sequence[bytes]) -> Answer | None:
        """Handle a request of the key-value store; return the answer, or None if the request waits for keys.

        Args:
            client: the ZeroMQ identity of the sender.
            frames: the kind, the number of the process group's generation, and the arguments of the kind.
        """
        kind, generation_number, arguments = Ask(frames[0]), int(frames[1]), frames[2:]
        if generation_number <= self._given_up:
            return [Said.GIVEN_UP.value]
        if kind is Ask.GIVE_UP:
            self._refuse_generation(generation_number)
            return [Said.DONE.value]
        generation = self._generations.setdefault(generation_number, _Generation())
        if kind in _WAITING_KINDS:
            # A client repeats its request after LEASE_S, so that those of a process that has ended expire.
            patience_s = min(int(arguments[0]) / 1000, LEASE_S)
            keys = [_checked_key(key) for key in arguments[1:]]
            request = _Waiting(client, kind, keys, self._clock_s() + max(patience_s, 0.0))
            return self._answer_or_wait(generation, request)
        return [Said.DONE.value, *self._act(generation, kind, arguments)]

    def _act(self, generation: _Generation, kind: Ask, arguments: Sequence[bytes]) -> Sequence[bytes]:
        """Carry out a request that does not wait, and return the values of its answer."""
        if kind is Ask.COUNT:
            return [_number(len(generation.values))]
        if kind is Ask.LIST:
            return list(generation.values)
        key = _checked_key(arguments[0])
        values = generation.values
        match kind:
            case Ask.SET:
                for name, value in zip(arguments[::2], arguments[1::2], strict=True):
                    self._store(generation, _checked_key(name), value)
            case Ask.ADD:
                total = _number(_as_number(values.get(key, b"0")) + int(arguments[1]))
                self._store(generation, key, total)
                return [total]
            case Ask.APPEND:
                self._store(generation, key, values.get(key, b"") + arguments[1])
            case Ask.COMPARE_SET:
                _, expected, desired = arguments
                # As in torch's own stores, a key that is not there equals an empty value.
                if values.get(key, b"") == expected:
                    self._store(generation, key, desired)
                return [values.get(key, expected)]
            case Ask.CHECK:
                return [_number(all(generation.has(kind, _checked_key(name)) for name in arguments))]
            case Ask.DELETE:
                return [_number(generation.delete(key))]
            case Ask.PUSH:
                self._require_room(arguments[1], _size_bytes(key, arguments[1]))
                generation.push(key, arguments[1])
                self._wake(generation, key)
            case Ask.LENGTH:
                return [_number(len(generation.queues.get(key, ())))]
        return []

    def _store(self, generation: _Generation, key: bytes, value: bytes) -> None:
        """Store a value, and answer the requests that waited for it."""
        self._require_room(value, generation.growth_bytes(key, value))
        generation.put(key, value)
        self._wake(generation, key)

    def _require_room(self, value: bytes, growth_bytes: int) -> None:
        """Refuse a value if it is too large, or if the store would be so with `growth_bytes` more."""
        if len(value) > MAX_VALUE_BYTES:
            raise _RefusedError(f"a value of {len(value)} bytes is more than {MAX_VALUE_BYTES}")
        if self.num_bytes + growth_bytes > MAX_STORED_BYTES:
            raise _RefusedError(
                f"the store in which the ranks meet holds {self.num_bytes} bytes, and may hold at most "
                f"{MAX_STORED_BYTES}: delete keys that are not needed"
            )

    def _wake(self, generation: _Generation, key: bytes) -> None:
        """Answer the requests for which a key was the last missing one, now that it is stored."""
        for request in generation.take_complete(key):
            answer = self._answer_or_wait(generation, request)
            if answer is not None and not self._send(request.client, answer) and request.kind is Ask.POP:
                # The client has disconnected: the value belongs to whoever pops next.
                generation.push_back(request.keys[0], answer[1])

    def _answer_or_wait(self, generation: _Generation, request: _Waiting) -> Answer | None:
        """Return the answer if all keys of a request are stored or its time is over; else let the request
        wait, and return None."""
        request.missing = {key for key in request.keys if not generation.has(request.kind, key)}
        if request.missing:
            if request.until_mono_s <= self._clock_s():
                return [Said.LATER.value]
            if self.num_waiting >= MAX_WAITING:
                raise _RefusedError(f"{MAX_WAITING} requests wait already")
            generation.wait(request)
            self.next_expiry_mono_s = min(self.next_expiry_mono_s, request.until_mono_s)
            return None
        if request.kind is Ask.GET:
            return [Said.DONE.value, *(generation.values[key] for key in request.keys)]
        if request.kind is Ask.POP:
            return [Said.DONE.value, generation.pop(request.keys[0])]
        return [Said.DONE.value]

    def _refuse_generation(self, number: int) -> None:
        """Give up this generation and all earlier ones: answer their waiting requests, and drop their
        values."""
        self._given_up = number
        for ended in [other for other in self._generations if other <= number]:
            for request in self._generations.pop(ended).waiting:
                self._send(request.client, [Said.GIVEN_UP.value])


def _size_bytes(key: bytes, value: bytes) -> int:
    """How much a value counts against the limit of the store."""
    return len(key) + len(value) + OVERHEAD_BYTES


def _checked_key(key: bytes) -> bytes:
    """Return the key. Raise _RefusedError if it is too long."""
    if len(key) > MAX_KEY_BYTES:
        raise _RefusedError(f"a key of {len(key)} bytes is longer than {MAX_KEY_BYTES}")
    return key


def _as_number(value: bytes) -> int:
    """Decode a stored number. Raise _RefusedError for any other value."""
    try:
        return int(value)
    except ValueError:
        raise _RefusedError(
            "the value under this key is no whole number, so nothing can be added to it"
        ) from None


def _number(number: int) -> bytes:
    """Encode a number as the protocol does: in decimal."""
    return b"%d" % number


class Server:
    """Serves a `Meeting` on a free port, on a thread that runs until the process ends.

    Args:
        ip: the address to listen on.
        folder: the cluster's folder, into which the file with the address and the keys for the ranks is
            written.
    """

    def __init__(self, ip: str, folder: Path) -> None:
        # A separate context: its authentication handler (ZAP) would also apply to ipyparallel's sockets.
        context = zmq.Context()
        public_key, secret_key = zmq.curve_keypair()
        ranks_public_key, ranks_secret_key = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        # CurveZMQ alone would let in whoever knows the server's public key.
        only_the_ranks = SimpleNamespace(callback=lambda domain, key: key == ranks_public_key)
        self._authenticator.configure_curve_callback(_DOMAIN, only_the_ranks)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public_key, secret_key
        self._socket.zap_domain = _DOMAIN.encode()
        # zmq closes the connection of a client that sends more.
        self._socket.maxmsgsize = MAX_VALUE_BYTES + 2 * MAX_KEY_BYTES
        self._socket.tcp_keepalive = 1
        self._socket.router_mandatory = True
        # A client has one request under way on each connection.
        self._socket.sndhwm = 16
        port = self._socket.bind_to_random_port(f"tcp://{ip}")
        place = MeetingPlace(
            f"tcp://{ip}:{port}", public_key.decode(), ranks_public_key.decode(), ranks_secret_key.decode()
        )
        write_whole(folder / MEETING, place.as_json(), mode=0o600)
        self._meeting = Meeting(self._send)
        threading.Thread(target=self._serve, name="nbgpu-meeting", daemon=True).start()

    def _send(self, client: bytes, answer: Answer) -> bool:
        """Send an answer, and return whether the client still takes it."""
        try:
            self._socket.send_multipart([client, b"", *answer], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False  # the client has disconnected, or does not read its answers
        return True

    def _serve(self) -> None:
        """Take requests one by one, and wake up in between to answer those that expire."""
        while True:
            left_s = self._meeting.next_expiry_mono_s - time.monotonic()
            timeout_ms = None if left_s == math.inf else int(1000 * max(left_s, 0.0)) + 1
            if self._socket.poll(timeout_ms):
                try:
                    client, empty, *frames = self._socket.recv_multipart()
                    if empty == b"":
                        self._meeting.receive(client, frames)
                except Exception:  # noqa: BLE001 - it is logged
                    # Without this thread no group could be formed any more.
                    _log.exception("a request of a rank could not be answered")
            self._meeting.expire()
