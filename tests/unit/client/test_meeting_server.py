"""The server's part of the store in which the ranks meet, without sockets."""

from __future__ import annotations

import pytest

from nbgpu.client.engines import meeting
from nbgpu.client.engines.meeting import Meeting
from nbgpu.protocol.meeting import LEASE_S, MAX_KEY_BYTES, MAX_VALUE_BYTES, Ask, Said

DONE, LATER, GIVEN_UP, REFUSED = (said.value for said in (Said.DONE, Said.LATER, Said.GIVEN_UP, Said.REFUSED))


class Clients:
    """Asks a server and notes what it sends, with a clock that goes on by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[str, list[bytes]]] = []
        self.gone: set[str] = set()
        self.meeting = Meeting(self._send, lambda: self.now_s)

    def _send(self, client: bytes, answer: meeting.Answer) -> bool:
        self.sent.append((client.decode(), list(answer)))
        return client.decode() not in self.gone

    def ask(
        self, client: str, kind: Ask, *arguments: bytes, generation: int = 0
    ) -> list[tuple[str, list[bytes]]]:
        """Ask, and return what was sent to anybody because of it."""
        before = len(self.sent)
        self.meeting.receive(client.encode(), [kind.value, str(generation).encode(), *arguments])
        return self.sent[before:]


@pytest.fixture
def clients() -> Clients:
    return Clients()


def test_a_request_that_waits_is_answered_when_the_last_key_comes(clients: Clients) -> None:
    assert clients.ask("a", Ask.GET, b"1000", b"x", b"y") == []
    assert clients.ask("b", Ask.SET, b"y", b"2") == [("b", [DONE])]
    assert clients.ask("b", Ask.SET, b"x", b"1") == [("a", [DONE, b"1", b"2"]), ("b", [DONE])]
    assert clients.meeting.num_waiting == 0


def test_a_key_that_was_deleted_again_is_waited_for_again(clients: Clients) -> None:
    clients.ask("a", Ask.WAIT, b"1000", b"x", b"y")
    clients.ask("b", Ask.SET, b"x", b"1")
    clients.ask("b", Ask.DELETE, b"x")
    assert clients.ask("b", Ask.SET, b"y", b"1") == [("b", [DONE])]
    assert clients.ask("b", Ask.SET, b"x", b"1") == [("a", [DONE]), ("b", [DONE])]


def test_a_generation_that_is_given_up_frees_and_forgets(clients: Clients) -> None:
    clients.ask("b", Ask.SET, b"x", b"1" * 1000, generation=3)
    clients.ask("a", Ask.WAIT, b"1000", b"y", generation=3)
    clients.ask("c", Ask.WAIT, b"1000", b"y", generation=2)
    clients.ask("d", Ask.WAIT, b"1000", b"y", generation=4)
    freed = clients.ask("b", Ask.GIVE_UP, generation=3)
    assert sorted(freed) == [("a", [GIVEN_UP]), ("b", [DONE]), ("c", [GIVEN_UP])]
    assert clients.meeting.num_bytes == 0
    assert clients.ask("a", Ask.SET, b"y", b"1", generation=3) == [("a", [GIVEN_UP])]
    assert clients.ask("a", Ask.GIVE_UP, generation=2) == [("a", [GIVEN_UP])]
    assert clients.ask("a", Ask.SET, b"y", b"1", generation=4) == [("d", [DONE]), ("a", [DONE])]


def test_the_generations_do_not_see_one_another(clients: Clients) -> None:
    clients.ask("a", Ask.SET, b"x", b"1", generation=1)
    assert clients.ask("a", Ask.CHECK, b"x", generation=2) == [("a", [DONE, b"0"])]
    assert clients.ask("a", Ask.COUNT, generation=2) == [("a", [DONE, b"0"])]


def test_nobody_waits_for_longer_than_the_lease(clients: Clients) -> None:
    clients.ask("a", Ask.WAIT, b"3600000", b"x")
    clients.now_s = LEASE_S - 0.1
    clients.meeting.expire()
    assert clients.meeting.num_waiting == 1
    clients.now_s = LEASE_S
    clients.meeting.expire()
    assert clients.sent == [("a", [LATER])]
    assert clients.meeting.num_waiting == 0
    clients.meeting.expire()
    assert clients.ask("b", Ask.SET, b"x", b"1") == [("b", [DONE])]


def test_a_value_that_its_taker_did_not_get_goes_to_the_next(clients: Clients) -> None:
    clients.ask("a", Ask.POP, b"1000", b"q")
    clients.gone = {"a"}
    clients.ask("b", Ask.PUSH, b"q", b"1")
    assert clients.ask("b", Ask.POP, b"0", b"q") == [("b", [DONE, b"1"])]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"set"],
        [b"nonsense", b"0"],
        [b"set", b"first", b"k", b"v"],
        [b"set", b"0"],
        [b"set", b"0", b"k"],
        [b"get", b"0", b"soon", b"k"],
        [b"get", b"0"],
        [b"add", b"0", b"k", b"much"],
        [b"append", b"0", b"k"],
        [b"compare", b"0", b"k", b"v"],
    ],
)
def test_a_message_that_makes_no_sense_is_refused(clients: Clients, frames: list[bytes]) -> None:
    clients.meeting.receive(b"a", frames)
    ((client, answer),) = clients.sent
    assert client == "a"
    assert answer[0] == REFUSED
    assert clients.ask("a", Ask.SET, b"x", b"1") == [("a", [DONE])]


def test_what_a_client_can_store_is_bounded(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = b"k" * (MAX_KEY_BYTES + 1)
    for kind, arguments in [
        (Ask.SET, (too_long, b"v")),
        (Ask.WAIT, (b"0", too_long)),
        (Ask.SET, (b"k", bytes(MAX_VALUE_BYTES + 1))),
        (Ask.PUSH, (b"k", bytes(MAX_VALUE_BYTES + 1))),
    ]:
        ((_, (said, _)),) = clients.ask("a", kind, *arguments)
        assert said == REFUSED
    monkeypatch.setattr(meeting, "MAX_STORED_BYTES", 10_000)
    answers = [clients.ask("a", Ask.SET, b"%d" % n, bytes(100))[0][1][0] for n in range(100)]
    assert set(answers[:20]) == {DONE}
    assert set(answers[50:]) == {REFUSED}
    assert clients.meeting.num_bytes <= 10_000
    # A value in the place of one of the same size needs no more room, also where there is none.
    monkeypatch.setattr(meeting, "MAX_STORED_BYTES", clients.meeting.num_bytes)
    assert clients.ask("a", Ask.SET, b"0", bytes(100))[0][1][0] == DONE
    monkeypatch.setattr(meeting, "MAX_STORED_BYTES", 10_000)
    grown = [clients.ask("a", Ask.APPEND, b"0", bytes(1000))[0][1][0] for _ in range(20)]
    assert grown[-1] == REFUSED
    # What is deleted makes room.
    for n in range(50):
        clients.ask("a", Ask.DELETE, b"%d" % n)
    assert clients.meeting.num_bytes == 0
    monkeypatch.setattr(meeting, "MAX_WAITING", 3)
    waiting = [clients.ask(str(n), Ask.WAIT, b"1000", b"never") for n in range(4)]
    assert [len(sent) for sent in waiting] == [0, 0, 0, 1]
