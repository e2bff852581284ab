"""The store in which the ranks meet answers as torch's own stores do, for several threads and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from nbgpu.engine.group import meeting
from nbgpu.protocol.meeting import MAX_VALUE_BYTES, MEETING, Ask, MeetingPlace

HANGS_S = 60.0
SERVER = """
import sys
from pathlib import Path
from nbgpu.client.engines.meeting import Server
server = Server("127.0.0.1", Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
OTHER_RANK = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from nbgpu.engine.group import meeting
from nbgpu.protocol.meeting import MeetingPlace
store = meeting.Store(MeetingPlace.read(Path(sys.argv[1])), int(sys.argv[2]))
rank, world_size, what = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
"""
FORMS_GROUPS = """
import os
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total, group=dist.new_group(list(range(world_size))))
objects = [None] * world_size
dist.all_gather_object(objects, rank)
mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
dist.barrier()
print(int(total), objects, mesh.size())
dist.destroy_process_group()
"""


@contextlib.contextmanager
def server_in(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("meeting")
    with server_in(path):
        yield path


generations = iter(range(1000))


@pytest.fixture
def store(folder: Path) -> Iterator[meeting.Store]:
    made = meeting.Store(MeetingPlace.read(folder / MEETING), next(generations))
    made.set_timeout(timedelta(seconds=HANGS_S))
    yield made
    made.give_up()


SHORT = timedelta(milliseconds=50)
CALLS: dict[str, Callable[[Any], Any]] = {
    "set and get": lambda s: [s.set("k", "v"), s.get("k")],
    "set again": lambda s: [s.set("k", "v"), s.set("k", "w"), s.get("k")],
    "an empty value": lambda s: [s.set("k", ""), s.get("k"), s.check(["k"])],
    "a key of other letters": lambda s: [s.set("schlüssel/🔑", "wert"), s.get("schlüssel/🔑")],
    "add": lambda s: [s.add("n", 1), s.add("n", 41), s.add("n", -2), s.get("n")],
    "add to a number that was set": lambda s: [s.set("n", "5"), s.add("n", 2)],
    "check": lambda s: [s.set("a", "1"), s.check(["a"]), s.check(["a", "b"])],
    "wait for keys that are there": lambda s: [s.set("a", "1"), s.set("b", "1"), s.wait(["a", "b"])],
    "wait in vain": lambda s: s.wait(["a"], SHORT),
    "compare with nothing there": lambda s: [s.compare_set("k", "", "new"), s.get("k")],
    "compare with nothing there, wrong": lambda s: [s.compare_set("k", "old", "new"), s.check(["k"])],
    "compare": lambda s: [s.set("k", "old"), s.compare_set("k", "old", "new"), s.get("k")],
    "compare, wrong": lambda s: [s.set("k", "old"), s.compare_set("k", "odd", "new"), s.get("k")],
    "the timeout": lambda s: [s.set_timeout(timedelta(seconds=7)), s.timeout],
    "get in vain": lambda s: [s.set_timeout(SHORT), s.get("k")],
    "a prefix": lambda s: [
        dist.PrefixStore("p", s).set("k", "v"),  # type: ignore[attr-defined]
        s.get("p/k"),
        dist.PrefixStore("p", s).get("k"),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).delete_key("k"),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).check(["k"]),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).compare_set("k", "", "w"),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).add("n", 3),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).wait(["n"], SHORT),  # type: ignore[attr-defined]
    ],
    "a prefix, in vain": lambda s: dist.PrefixStore("p", s).wait(["k"], SHORT),  # type: ignore[attr-defined]
    "a clone": lambda s: [s.set("k", "v"), s.clone().get("k"), dist.PrefixStore("p", s).clone().check(["k"])],  # type: ignore[attr-defined]
}
OF_HASHSTORE: dict[str, Callable[[Any], Any]] = {
    # In a FileStore a deleted key counts as one that was set once.
    "delete": lambda s: [s.set("k", "1"), s.delete_key("k"), s.delete_key("k"), s.check(["k"])],
    "append": lambda s: [s.append("k", "a"), s.append("k", "b"), s.get("k")],
    "several at once": lambda s: [s.multi_set(["a", "b"], ["1", "2"]), s.multi_get(["b", "a"])],
    "several through a prefix": lambda s: [
        dist.PrefixStore("p", s).multi_set(["a", "b"], ["1", "2"]),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).append("a", "3"),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).multi_get(["b", "a"]),  # type: ignore[attr-defined]
        dist.PrefixStore("p", s).has_extended_api(),  # type: ignore[attr-defined]
    ],
    "the number of keys": lambda s: [s.set("a", "1"), s.add("n", 1), s.delete_key("a"), s.num_keys()],
    "a queue": lambda s: [
        s.queue_push("q", "1"),
        s.queue_push("q", "2"),
        s.queue_len("q"),
        s.check(["q"]),
        s.wait(["q"], SHORT),
        s.queue_pop("q"),
        s.queue_pop("q"),
        s.queue_len("q"),
    ],
    "an empty queue": lambda s: s.queue_pop("q", False),
    "an empty queue, waiting": lambda s: [s.set_timeout(SHORT), s.queue_pop("q")],
}


def outcome(call: Callable[[Any], Any], store: Any) -> Any:
    """What a call gives, or the kind of its error."""
    store.set_timeout(timedelta(seconds=10))
    try:
        return call(store)
    except RuntimeError as error:
        return type(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, *OF_HASHSTORE])
def test_a_call_gives_what_it_gives_on_torchs_own_stores(
    name: str, store: meeting.Store, tmp_path: Path
) -> None:
    call = {**CALLS, **OF_HASHSTORE}[name]
    expected = outcome(call, dist.HashStore())  # type: ignore[attr-defined]
    assert outcome(call, store) == expected
    if name in CALLS:
        of_file = outcome(call, dist.FileStore(str(tmp_path / "store"), 1))  # type: ignore[attr-defined]
        # It raises a plain RuntimeError, of which DistStoreError is one.
        assert of_file == (RuntimeError if expected is dist.DistStoreError else expected)


def test_any_bytes_come_back(store: meeting.Store) -> None:
    value = bytes(range(256)) * 4096
    store.set("k", value)
    assert store.get("k") == value


def test_many_threads_count_and_wait(store: meeting.Store) -> None:
    """Each waits for the next one, so that none could go on if they waited in turns."""
    num = 16

    def work(thread: int) -> int:
        for _ in range(50):
            store.add("n", 1)
        if thread + 1 < num:
            store.wait([f"done {thread + 1}"])
        store.set(f"done {thread}", "")
        return int(store.get("n"))

    with ThreadPoolExecutor(num) as pool:
        seen = list(pool.map(work, range(num)))
    assert seen[0] == store.add("n", 0) == num * 50


def test_a_waiting_thread_is_freed_when_the_group_is_given_up(store: meeting.Store) -> None:
    prefixed = dist.PrefixStore("p", store)  # type: ignore[attr-defined]
    waits = [
        lambda: store.get("never"),
        lambda: store.wait(["never"], timedelta(hours=1)),
        lambda: prefixed.get("never"),
        lambda: prefixed.wait(["never"], timedelta(hours=1)),
        lambda: store.queue_pop("never"),
    ]
    begun = threading.Barrier(len(waits) + 1)

    def wait(call: Callable[[], Any]) -> None:
        begun.wait()
        with pytest.raises(dist.DistStoreError, match="given up"):
            call()

    with ThreadPoolExecutor(len(waits)) as pool:
        waiting = [pool.submit(wait, call) for call in waits]
        begun.wait()
        time.sleep(0.1)
        store.give_up()
        for future in waiting:
            future.result(HANGS_S)
    with pytest.raises(dist.DistStoreError, match="given up"):
        store.set("k", "v")


def started(
    folder: Path, generation: int, code: str, rank: int = 0, world_size: int = 1
) -> subprocess.Popen[str]:
    place = [str(folder / MEETING), str(generation), str(rank), str(world_size), ""]
    return subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK + code, *place],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_groups_are_made_in_it_by_processes(folder: Path) -> None:
    generation = next(generations)
    ranks = [started(folder, generation, FORMS_GROUPS, rank, 2) for rank in range(2)]
    for rank in ranks:
        printed, errors = rank.communicate(timeout=2 * HANGS_S)
        assert printed == "2 [0, 1] 2\n", errors


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_waits_is_forgotten(folder: Path, store: meeting.Store) -> None:
    """It would take what others wait for."""
    code = "store.set('here', ''); store.queue_pop('q')"
    with started(folder, int(store._generation), code) as killed:
        store.wait(["here"])
        time.sleep(0.2)
        killed.kill()
        killed.communicate()
    time.sleep(0.2)
    store.queue_push("q", "1")
    assert store.queue_pop("q") == b"1"


def test_a_forked_child_has_connections_of_its_own(store: meeting.Store) -> None:
    store.set("k", "v")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if store.get("k") == b"v" and store.add("n", 1) == 1 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.add("n", 1) == 2


def test_an_interrupt_ends_a_wait_and_the_store_can_be_used_on(store: meeting.Store) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            store.wait(["never"], timedelta(hours=1))
    finally:
        signal.signal(signal.SIGINT, before)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_value_that_is_too_large_is_refused_here(store: meeting.Store) -> None:
    with pytest.raises(ValueError, match="too large"):
        store.set("k", bytes(MAX_VALUE_BYTES + 1))
    store.set("k", "v")
    assert store.num_keys() == 1


def test_a_server_that_is_gone_leaves_nobody_waiting_who_is_freed(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        store = meeting.Store(MeetingPlace.read(tmp_path / MEETING), 0)
        store.set("k", "v")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: store.wait(["never"], timedelta(hours=1)))
            time.sleep(0.1)
            server.kill()
            server.wait()
            store.give_up()
            with pytest.raises(dist.DistStoreError, match="given up"):
                waiting.result(HANGS_S)


KEYS = ("server_public_key", "public_key", "secret_key")


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [*KEYS, "the pair", "everything"])
def test_a_stranger_gets_nothing(lacks: str, folder: Path, store: meeting.Store) -> None:
    """Also one that knows the server's public key, which is no secret in CurveZMQ."""
    place = MeetingPlace.read(folder / MEETING)
    store.set("secret", "1")
    other_public, other_secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
        stranger.linger = 0
        if lacks != "everything":
            is_other = {key: lacks == key for key in KEYS}
            if lacks == "the pair":
                is_other |= {"public_key": True, "secret_key": True}
            stranger.curve_serverkey = (
                other_public if is_other["server_public_key"] else place.server_public_key.encode()
            )
            stranger.curve_publickey = other_public if is_other["public_key"] else place.public_key.encode()
            stranger.curve_secretkey = other_secret if is_other["secret_key"] else place.secret_key.encode()
        stranger.connect(place.address)
        stranger.send_multipart([Ask.GET.value, store._generation, b"100", b"secret"])
        assert not stranger.poll(1000)
        stranger.close()
    assert store.get("secret") == b"1"


def test_only_the_user_can_read_the_keys(folder: Path) -> None:
    assert (folder / MEETING).stat().st_mode & 0o777 == 0o600
