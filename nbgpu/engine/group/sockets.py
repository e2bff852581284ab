"""The TCP connections that process groups opened, and how to cut them.

gloo cannot give up a collective: a rank that waits for a rank that raised waits for the whole timeout, and
neither `abort` nor `destroy_process_group` frees it. Shutting down its connections does.

gloo takes the first process that connects and sends the expected number for the rank that it waits for. Of a
process on its own host a rank can see the user; of one on another host it sees an address and a port. So
every rank writes its connections into the store, which only processes with the cluster's keys can reach, and
a connection whose other end no rank has written there belongs to a stranger.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

Connections = dict[int, int]
"""The inode of each connection by its file descriptor. The inode tells a connection from a later file with
the same descriptor."""

_QUIET_S = 0.02
"""How long no byte may have moved before the connections are cut."""
_QUIET_PATIENCE_S = 1.0
_LOOK_PERIOD_S = 0.002
_LATENESS_FACTOR = 3
"""The quiet time is at least this many times the delay with which this thread wakes up."""
_TCP_INFO_BYTES = 256
_LISTENING = "0A"
_NO_INODE = "0"
"""A state and an inode as /proc/net/tcp writes them."""
_ANY_IPV4, _ANY_IPV6 = "0" * 8, "0" * 32
_MAPPED_IPV4 = "0" * 16 + ("FFFF0000" if sys.byteorder == "little" else "0000FFFF")
"""The beginning of an IPv4 address that belongs to an IPv6 socket ('::ffff:1.2.3.4'), in /proc/net/tcp6."""
_BYTES_ACKED_OFFSET = 120
"""The offset in struct tcp_info (linux/tcp.h) of tcpi_bytes_acked and tcpi_bytes_received, 8 bytes each."""

_group_connections: Connections = {}
_newest_connections: Connections = {}
"""The connections of the group that was made last."""
_is_in_the_making = False
"""Whether the main thread is making a group."""


Result = TypeVar("Result")

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The addresses and ports of a connection: this process's, and the other's."""


@contextmanager
def group_in_the_making() -> Iterator[None]:
    """Mark that the main thread makes a group in this block. The thread that cuts connections waits for the
    end of the block, because a rank that is connecting over gloo cannot be freed."""
    global _is_in_the_making  # read by the thread that cuts
    before, _is_in_the_making = _is_in_the_making, True
    try:
        yield
    finally:
        _is_in_the_making = before


def is_group_in_the_making() -> bool:
    """Return whether the main thread is making a group."""
    return _is_in_the_making


@contextmanager
def noted_as_groups() -> Iterator[None]:
    """Record the connections that are opened in the block as those of a process group."""
    global _newest_connections
    before = _open_connections()
    try:
        with group_in_the_making():
            yield
    finally:
        _newest_connections = dict(_open_connections().items() - before.items())
        _group_connections.update(_newest_connections)


def wait_for_group_in_the_making(patience_s: float) -> None:
    """Wait until the main thread makes no group, for at most `patience_s` seconds. Call on another thread."""
    give_up_s = time.monotonic() + patience_s
    while _is_in_the_making and time.monotonic() < give_up_s:
        time.sleep(_LOOK_PERIOD_S)


def refuse_other_users() -> None:
    """Check that no process of another user of this host is at the other end of a group's connection. Call
    before the first tensor is sent.

    Raises:
        ConnectionError: there is such a process.
    """
    uid_by_ends = _uid_by_ends()
    own_uid = os.getuid()
    # The peer's socket has the two addresses the other way round. A socket that is not in the table has just
    # been closed. `refuse_strangers` checks connections to other hosts.
    uids = [
        uid_by_ends.get((_as_in_proc(there), _as_in_proc(here)), own_uid)
        for here, there in _call_on_open(_ends, _group_connections)
        if here[0] == there[0]
    ]
    if strangers := [uid for uid in uids if uid != own_uid]:
        raise ConnectionError(
            f"a process of another user (uid {strangers[0]}) took a rank's place while the process group was formed; "
            "no tensor was sent to it. Try again, and ask that user, or the machine's administrator"
        )


def _uid_by_ends() -> dict[tuple[str, str], int]:
    """Return the user of each TCP socket of this host, by its own and its peer's address in the notation of
    /proc/net/tcp (proc_net_tcp in the kernel's docs).

    The tables show a connection that was not accepted yet as root's, and without an inode. Here such a
    connection has the user of the socket that listens for it.
    """
    uids: dict[tuple[str, str], int] = {}
    listeners: dict[str, int] = {}
    not_accepted = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                _, here, there, state, _, _, _, uid, _, inode, *_ = line.replace(_MAPPED_IPV4, "").split()
                if state == _LISTENING:
                    listeners[here] = int(uid)
                elif inode == _NO_INODE:
                    not_accepted.append((here, there))
                else:
                    uids[here, there] = int(uid)
    for here, there in not_accepted:
        port = here.partition(":")[2]
        for listening_at in (here, f"{_ANY_IPV4}:{port}", f"{_ANY_IPV6}:{port}"):
            if listening_at in listeners:
                uids[here, there] = listeners[listening_at]
                break
    return uids


def _as_in_proc(address: tuple[str, int]) -> str:
    """Return an address in the notation of /proc/net/tcp: ('127.0.0.1', 80) as '0100007F:0050', with each
    four bytes of the IP address in the host's byte order."""
    host, port = _plain(address), address[1]
    raw = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    integers = struct.unpack(f"={len(raw) // 4}I", raw)
    return "".join(f"{integer:08X}" for integer in integers) + f":{port:04X}"


def cut() -> None:
    """Shut down every TCP connection of the process groups of this process, which makes the threads that wait
    in collectives raise.

    The function first waits, for at most a second, until the connections are idle, because gloo does not
    notice that a transfer was cut in the middle and waits for the whole timeout.
    """
    connections = dict(_group_connections)
    if _call_on_open(lambda _: None, connections):  # one is open
        _wait_until_quiet()
        connections = dict(_group_connections)
        _call_on_open(lambda connection: connection.shutdown(socket.SHUT_RDWR), connections)
    # Not `clear`: the main thread may be adding the connections of a group that it has just made.
    for fd in connections:
        _group_connections.pop(fd, None)


def _wait_until_quiet() -> None:
    """Wait until the groups' connections have moved no bytes for a while, for `_QUIET_PATIENCE_S` at most."""
    started_s = quiet_since_s = checked_s = time.monotonic()
    quiet_s = _QUIET_S
    last_bytes = moved_bytes()
    while checked_s - quiet_since_s < quiet_s and checked_s - started_s < _QUIET_PATIENCE_S:
        time.sleep(_LOOK_PERIOD_S)
        now_s = time.monotonic()
        # If this thread waits long for a core, the threads that move the data do too.
        quiet_s = max(quiet_s, _LATENESS_FACTOR * (now_s - checked_s - _LOOK_PERIOD_S))
        checked_s = now_s
        now_bytes = moved_bytes()
        if now_bytes != last_bytes or _bytes_on_their_way():
            last_bytes, quiet_since_s = now_bytes, now_s


def _open_connections() -> Connections:
    """Return all TCP connections that this process has now."""
    connections: Connections = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each would triple the time
        # Another thread may close the descriptor at any moment.
        with suppress(OSError):
            fd = int(name)
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and _is_connected_tcp(fd):
                connections[fd] = status.st_ino
    return connections


def _is_connected_tcp(fd: int) -> bool:
    """Return whether a file descriptor is a TCP socket with a peer; OSError for one without a peer."""
    # A duplicate descriptor of the same connection, because Python's socket object closes its descriptor.
    with socket.socket(fileno=os.dup(fd)) as duplicate:
        if duplicate.type != socket.SOCK_STREAM or duplicate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        duplicate.getpeername()  # OSError without a peer
        return True


def _call_on_open(call: Callable[[socket.socket], Result], connections: Connections) -> list[Result]:
    """Call a function with each of these connections that is still open; return the results."""
    results = []
    # A copy: other threads call this while the main thread may be making a group.
    for fd, inode in list(connections.items()):
        with suppress(OSError):
            # Another inode: the connection was closed, and its descriptor belongs to another file now.
            if os.fstat(fd).st_ino == inode:
                with socket.socket(fileno=os.dup(fd)) as duplicate:
                    results.append(call(duplicate))
    return results


def _ends(connection: socket.socket) -> Ends:
    """Return the address and port of both ends of a connection, this process's first."""
    here, there = connection.getsockname(), connection.getpeername()
    return (here[0], here[1]), (there[0], there[1])


def moved_bytes() -> int:
    """Return the number of bytes that the peers have acknowledged or sent, over all connections of groups."""

    def moved(connection: socket.socket) -> int:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return sum(struct.unpack_from("QQ", info, _BYTES_ACKED_OFFSET))

    return sum(_call_on_open(moved, _group_connections))


def _bytes_on_their_way() -> int:
    """Return the number of bytes that were sent and not yet acknowledged, or received and not yet read."""

    def waiting(connection: socket.socket) -> int:
        queues = termios.TIOCOUTQ, termios.FIONREAD  # man 7 tcp: SIOCOUTQ and SIOCINQ, by other names
        return sum(struct.unpack("i", fcntl.ioctl(connection, queue, bytes(4)))[0] for queue in queues)

    return sum(_call_on_open(waiting, _group_connections))


def refuse_strangers(
    store: dist.Store,  # type: ignore[name-defined]
    group: str,
    rank: int,
    ranks: Sequence[int],
    patience: timedelta,
) -> None:
    """Check that each connection of the newest group to another host ends at a rank of the group.

    Every rank of a group that spans several hosts calls this before the first tensor is sent.

    Args:
        store: the store in which the ranks of the generation meet.
        group: the name of the group, unique in the generation.
        rank: this rank.
        ranks: all ranks of the group.
        patience: the time for the other ranks to write which connections are theirs.

    Raises:
        ConnectionError: a connection ends at another process, or a rank does not write which are its own.
    """
    to_other_hosts = _ends_at_other_hosts()
    if not to_other_hosts:
        return
    keys = {member: f"nbgpu/ends/{group}/{member}" for member in ranks}
    store.set(keys[rank], json.dumps(to_other_hosts))
    try:
        store.wait(list(keys.values()), patience)
    except dist.DistStoreError as error:
        raise ConnectionError(
            f"a rank of another host has not said which connections are its own: {error}. No tensor was sent"
        ) from None
    answers = chain.from_iterable(map(json.loads, store.multi_get(list(keys.values()))))
    claimed = {(tuple(here), tuple(there)) for here, there in answers}
    # A rank reports the same connection with its own end first; nobody reports that of a stranger.
    strangers = [there for here, there in to_other_hosts if (there, here) not in claimed]
    if strangers:
        named = ", ".join(sorted({f"{address}:{port}" for address, port in strangers}))
        raise ConnectionError(
            f"what is at {named} is in a rank's place in the process group and is none of the cluster's ranks; no tensor was "
            "sent to it. It is a process of somebody else, or addresses are translated (NAT) between the hosts, over "
            "which a group cannot be formed"
        )


def _ends_at_other_hosts() -> list[Ends]:
    """Return both ends of each connection of the newest group that leads to another host."""
    to_other_hosts = []
    for here, there in _call_on_open(_ends, _newest_connections):
        ends = (_plain(here), here[1]), (_plain(there), there[1])
        # A connection within one host has the same address at both ends.
        if ends[0][0] != ends[1][0]:
            to_other_hosts.append(ends)
    return to_other_hosts


def _plain(address: tuple[str, int]) -> str:
    """Return the IP address of (address, port) in a form that is the same at both ends of a connection:
    without a scope such as '%eth0', and as IPv4 where an IPv6 socket shows '::ffff:1.2.3.4'."""
    parsed = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)
