"""The slow links of the tests: as slow as they say, for as long as they are asked for."""

from __future__ import annotations

import socket
import time

import psutil
import pytest
from slow_link import INTERFACE, Place, slow_link

pytestmark = pytest.mark.slow_link

BITS_PER_S, DELAY_S = 100e6, 0.005
NUM_BYTES = 500_000
HEADERS = 1538 / 1448
"""A segment of 1448 bytes takes so many on the wire."""


def there_and_back(place: Place, num_bytes: int) -> dict[str, float]:
    """Host 0 sends bytes to host 1 and waits for an answer of one; returns the times on host 0."""
    ready = place.rendezvous / "ready"
    if place.rank:
        with socket.create_server((place.address, 9000)) as server:
            ready.touch()
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for expected in (1, num_bytes):
                    while expected:
                        expected -= len(connection.recv(expected))
                    connection.send(b"!")
        return {}
    while not ready.exists():
        time.sleep(0.01)
    with socket.create_connection(("198.19.0.2", 9000)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took_s = {}
        for name, content in (("one byte", b"?"), ("all bytes", b"?" * num_bytes)):
            begun_s = time.perf_counter()
            connection.sendall(content)
            connection.recv(1)
            took_s[name] = time.perf_counter() - begun_s
        return took_s


def fail_on_the_second(place: Place) -> None:
    if place.rank:
        raise ValueError(f"the second host of {place.world_size}")
    time.sleep(60)


def interfaces(_: Place) -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def test_a_link_is_as_slow_as_it_says() -> None:
    with slow_link(2, BITS_PER_S, DELAY_S) as link:
        took_s, _ = link.run(there_and_back, num_bytes=NUM_BYTES)
    assert took_s["one byte"] >= 2 * DELAY_S
    # A few bytes are still in the interface's own queue when the clock starts.
    assert took_s["all bytes"] >= 2 * DELAY_S + 0.95 * 8 * NUM_BYTES * HEADERS / BITS_PER_S
    assert link.report["lost"] == 0
    assert link.report["wire_bytes"] > NUM_BYTES * HEADERS


@pytest.mark.slow
def test_hosts_see_nothing_but_their_link_and_go_with_it() -> None:
    with slow_link(3, BITS_PER_S, DELAY_S) as link:
        assert [sorted(found) for found in link.run(interfaces)] == [["lo", INTERFACE]] * 3
        pid = int(link.hosts[0].namespace.split("/")[2])
    assert not psutil.pid_exists(pid)


def test_a_host_that_fails_ends_the_others_and_is_named() -> None:
    with slow_link(2, BITS_PER_S, DELAY_S) as link:
        begun_s = time.monotonic()
        with pytest.raises(RuntimeError, match=r"host 1 ended with 1:\n(.|\n)*the second host of 2"):
            link.run(fail_on_the_second)
        assert time.monotonic() - begun_s < 50
