"""From a rank to the notebook: every record once and in order, whatever the socket loses, and to nobody
else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from nbgpu.protocol.records import Device, Event, Sample
from nbgpu.run_folder.commands import (
    CommandWatch,
    pass_over_earlier_requests,
    send_command,
    send_settings,
)
from nbgpu.run_folder.folder import note_change
from nbgpu.run_folder.progress import NewestRecords
from nbgpu.run_folder.rank_files import Record, endpoint_path, record_path
from nbgpu.run_folder.reader import START, WINDOW, Reader
from nbgpu.run_folder.recorder import Recorder

HANG_S = 300
"""Far longer than anything here takes: only something that hangs reaches it."""

CPUS = tuple(Device("cpu", "A processor", "", index, 8_000_000_000) for index in range(4))


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"still waiting until {what}"
        time.sleep(0.01)


@contextmanager
def recording(folder: Path, rank: int = 0) -> Iterator[Recorder]:
    recorder = Recorder(folder, rank)
    try:
        yield recorder
    finally:
        recorder.close()


@contextmanager
def reading(folder: Path, world_size: int = 1) -> Iterator[Reader]:
    reader = Reader(folder, world_size)
    try:
        yield reader
    finally:
        reader.close()


def seqs(reader: Reader, rank: int = 0) -> list[int]:
    return [record.seq for record in reader.since()[0] if record.rank == rank]


def wait_for(reader: Reader, num_records: int, rank: int = 0) -> None:
    wait_until(lambda: len(seqs(reader, rank)) >= num_records, f"rank {rank} has {num_records} records")


def test_two_ranks_under_load_have_no_gap_and_no_repetition(tmp_path: Path) -> None:
    num_records = 5_000
    with (
        recording(tmp_path, 0) as first,
        recording(tmp_path, 1) as second,
        reading(tmp_path, world_size=2) as reader,
    ):

        def record_all(recorder: Recorder) -> None:
            for step in range(num_records):
                recorder.sample(step, loss=1 / (step + 1))

        threads = [threading.Thread(target=record_all, args=(recorder,)) for recorder in (first, second)]
        for thread in threads:
            thread.start()
        collected: list[Record] = []
        cursor = START
        deadline_s = time.monotonic() + HANG_S
        while len(collected) < 2 * num_records and time.monotonic() < deadline_s:
            arrived, cursor = reader.since(cursor)
            collected += arrived
            time.sleep(0.01)
        for thread in threads:
            thread.join()
    for rank in (0, 1):
        mine = [record for record in collected if record.rank == rank]
        assert [record.seq for record in mine] == list(range(num_records))
        assert [record.step for record in mine] == list(range(num_records))


def test_a_record_arrives_while_the_rank_is_busy_elsewhere(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder, reading(tmp_path) as reader:
        recorder.sample(7, loss=0.5)
        recorder.event("checkpoint", "at step 7", path="a")
        wait_for(reader, 2)
        sample, event = reader.since()[0]
    assert isinstance(sample, Sample)
    assert (sample.rank, sample.step, sample.values) == (0, 7, {"loss": 0.5})
    assert isinstance(event, Event)
    assert (event.kind, event.step, event.detail) == ("checkpoint", 7, {"path": "a"})


def test_a_cursor_gives_only_what_is_new(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder, reading(tmp_path) as reader:
        recorder.sample(1, loss=1.0)
        wait_for(reader, 1)
        _, cursor = reader.since()
        assert reader.since(cursor) == ([], cursor)
        recorder.sample(2, loss=2.0)
        wait_for(reader, 2)
        assert [record.step for record in reader.since(cursor)[0]] == [2]


@pytest.mark.parametrize("path", [record_path, endpoint_path])
def test_the_curves_go_on_after_a_file_could_not_be_read(
    path: Callable[[Path, int], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with reading(tmp_path) as reader:
        # Reading the first byte of this file is an input/output error.
        path(tmp_path, 0).symlink_to("/proc/self/mem")
        wait_until(lambda: "records of rank 0 come late" in caplog.text, "the error is logged")
        path(tmp_path, 0).unlink()
        with recording(tmp_path) as recorder:
            recorder.sample(1, loss=1.0)
            wait_for(reader, 1)
    assert caplog.text.count("come late") == 1


def test_an_interrupt_leaves_no_gap_in_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(str):
        def encode(self, *_args: str) -> bytes:
            raise KeyboardInterrupt

    with recording(tmp_path) as recorder:
        recorder.sample(1, loss=1.0)
        with monkeypatch.context() as patched:
            patched.setattr(json, "dumps", lambda _fields: Interrupted())
            with pytest.raises(KeyboardInterrupt):
                recorder.sample(2, loss=2.0)
        recorder.sample(3, loss=3.0)
    with reading(tmp_path) as reader:
        assert seqs(reader) == [0, 1]
        assert reader.damage() == []


def test_who_comes_late_gets_the_past_too(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        for step in range(100):
            recorder.sample(step, loss=0.0)
        wait_until(lambda: record_path(tmp_path, 0).read_bytes().count(b"\n") == 100, "100 are written")
        with reading(tmp_path) as reader:
            wait_for(reader, 100)
            for step in range(100, 200):
                recorder.sample(step, loss=0.0)
            wait_for(reader, 200)
            assert seqs(reader) == list(range(200))


def test_a_long_run_takes_little_memory_and_has_all_of_its_history(tmp_path: Path) -> None:
    num_records = 3 * WINDOW + 7
    for rank in (0, 1):
        lines = [
            json.dumps({"seq": i, "time_s": i + 0.5 * rank, "step": i, "values": {"loss": 1 / (i + 1)}})
            for i in range(num_records - 1)
        ]
        last = {"seq": num_records - 1, "time_s": 1e9, "step": 0, "kind": "note", "text": "x", "detail": {}}
        record_path(tmp_path, rank).write_text("\n".join([*lines, json.dumps(last)]) + "\n")
    reader = Reader(tmp_path, world_size=2, live=False)
    assert [len(source.newest) for source in reader._sources] == [WINDOW, WINDOW]
    assert [(event.rank, event.text) for event in reader.events()] == [(0, "x"), (1, "x")]
    read = []
    for batch, _ in reader.batches():
        assert len(batch) <= 2 * WINDOW
        read += [(record.rank, record.seq) for record in batch]
    assert sorted(read) == [(rank, i) for rank in (0, 1) for i in range(num_records)]
    assert read[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]  # in the order of their times
    assert reader.since((num_records, num_records)) == ([], (num_records, num_records))
    # From any place: before the window, at its edge, and in it.
    for count in (5, WINDOW, num_records - WINDOW - 1, num_records - WINDOW, num_records - 2):
        records, _ = reader.since((count, num_records))
        assert [record.seq for record in records] == list(range(count, num_records))


def test_who_comes_early_waits_for_the_rank(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        assert reader.since() == ([], (0,))
        with recording(tmp_path) as recorder:
            recorder.sample(0, loss=0.0)
            wait_for(reader, 1)


def test_a_new_reader_has_the_whole_history(tmp_path: Path) -> None:
    """A notebook's kernel is restarted while the run goes on."""
    with recording(tmp_path) as recorder:
        with reading(tmp_path) as first:
            for step in range(50):
                recorder.sample(step, loss=0.0)
            wait_for(first, 50)
        for step in range(50, 80):
            recorder.sample(step, loss=0.0)
        with reading(tmp_path) as second:
            wait_for(second, 80)
            assert seqs(second) == list(range(80))
        assert seqs(first) == list(range(len(seqs(first)))), "what was read stays readable"


def test_a_run_that_is_over_is_read_from_its_files(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        for step in range(20):
            recorder.sample(step, loss=0.0)
        recorder.state("finished")
    reader = Reader(tmp_path, 1, live=False)
    assert seqs(reader) == list(range(21))
    (status,) = reader.statuses(CPUS)
    assert (status.state, status.step, status.silent_s) == ("finished", 19, 0.0)
    reader.close()


def test_close_reads_what_was_still_on_its_way(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        reader = Reader(tmp_path, 1)
        for step in range(1000):
            recorder.sample(step, loss=0.0)
    reader.close()
    assert seqs(reader) == list(range(1000))


def _line(seq: int) -> bytes:
    return json.dumps({"seq": seq, "time_s": 0.0, "step": seq, "values": {"loss": 1.0}}).encode() + b"\n"


@contextmanager
def publishing(folder: Path) -> Iterator[Callable[[bytes], None]]:
    """A rank's socket with no rank behind it, so that a test decides what is sent and what is written."""
    context = zmq.Context()
    # XPUB tells when the reader has subscribed; what is sent before that is lost, as with any rank.
    publisher = context.socket(zmq.XPUB)
    publisher.curve_server = True
    public_key, publisher.curve_secretkey = zmq.curve_keypair()
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    endpoint = {"address": f"tcp://127.0.0.1:{port}", "public_key": public_key.decode()}
    (folder / "rank0.endpoint.json").write_text(json.dumps(endpoint))
    subscribed = False

    def send(batch: bytes) -> None:
        nonlocal subscribed
        if not subscribed:
            assert publisher.poll(int(HANG_S * 1000)), "nobody subscribes"
            publisher.recv()
            subscribed = True
        publisher.send(batch)

    try:
        yield send
    finally:
        publisher.close(0)
        context.term()


def test_what_the_socket_drops_comes_from_the_file(tmp_path: Path) -> None:
    with publishing(tmp_path) as send, reading(tmp_path) as reader:
        lines = [_line(seq) for seq in range(30)]
        with record_path(tmp_path, 0).open("wb", buffering=0) as file:
            file.write(b"".join(lines[:10]))
            send(b"".join(lines[:10]))
            wait_for(reader, 10)
            # 10 to 19 never reach the socket.
            file.write(b"".join(lines[10:]))
            send(b"".join(lines[20:]))
            wait_for(reader, 30)
        assert seqs(reader) == list(range(30))


def test_what_the_socket_repeats_counts_once(tmp_path: Path) -> None:
    with publishing(tmp_path) as send, reading(tmp_path) as reader:
        lines = [_line(seq) for seq in range(20)]
        record_path(tmp_path, 0).write_bytes(b"".join(lines))
        for batch in (lines[:10], lines[5:15], lines[:10], lines[10:]):
            send(b"".join(batch))
        wait_for(reader, 20)
        assert seqs(reader) == list(range(20))


def test_half_a_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    """A rank may be killed, or read, in the middle of a write."""
    whole, half = _line(0), _line(1)
    path = record_path(tmp_path, 0)
    path.write_bytes(whole + half[:20])
    assert seqs(Reader(tmp_path, 1, live=False)) == [0]
    with reading(tmp_path) as reader:
        wait_for(reader, 1)
        with path.open("ab") as file:
            file.write(half[20:])
        wait_for(reader, 2)
        assert seqs(reader) == [0, 1]


def test_a_status_has_the_newest_of_every_series(tmp_path: Path) -> None:
    with recording(tmp_path, 1) as recorder, reading(tmp_path, world_size=2) as reader:
        recorder.state("training")
        recorder.sample(3, loss=0.5, memory_bytes=10)
        recorder.sample(4, loss=0.25)
        wait_for(reader, 3, rank=1)
        silent, busy = reader.statuses(CPUS)
    assert (silent.state, silent.step, silent.values) == ("starting", 0, {})
    assert (busy.state, busy.step, busy.values) == ("training", 4, {"loss": 0.25, "memory_bytes": 10})
    assert busy.device is CPUS[1]


def test_a_rank_that_begins_again_has_no_numbers_from_before(tmp_path: Path) -> None:
    """Such as the memory of the process that it replaces."""
    with recording(tmp_path) as recorder, reading(tmp_path) as reader:
        recorder.state("training")
        recorder.sample(4, loss=0.25, memory_bytes=10)
        recorder.state("loading packages")
        wait_for(reader, 3)
        (status,) = reader.statuses(CPUS[:1])
        newest = NewestRecords(tmp_path, 0)
        newest.read()
        assert (status.state, status.values, newest.values) == ("loading packages", {}, {})
        recorder.sample(5, loss=0.125)
        wait_for(reader, 4)
        (status,) = reader.statuses(CPUS[:1])
    newest.read()
    assert status.values == newest.values == {"loss": 0.125}


@pytest.mark.slow
def test_an_idle_rank_is_heard_and_a_stopped_one_falls_silent(tmp_path: Path) -> None:
    """The clock of silence starts again with every heartbeat, and a heartbeat is no record."""
    with reading(tmp_path) as reader:

        def silent_s() -> float:
            return reader.statuses(CPUS)[0].silent_s

        with recording(tmp_path) as recorder:
            recorder.sample(0, loss=0.0)
            wait_for(reader, 1)
            falls = 0
            last_s = silent_s()

            def three_heartbeats_came() -> bool:
                nonlocal falls, last_s
                now_s = silent_s()
                falls += now_s < last_s
                last_s = now_s
                return falls >= 3

            wait_until(three_heartbeats_came, "three heartbeats came")
        wait_until(lambda: silent_s() > 2.0, "the rank counts as silent")
        assert seqs(reader) == [0]
    assert record_path(tmp_path, 0).read_bytes().count(b"\n") == 1


def test_the_probe_gives_series_until_it_fails_once(tmp_path: Path) -> None:
    calls = 0

    def probe() -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError("the driver is gone")
        return {"memory_bytes": 5.0}

    recorder = Recorder(tmp_path, 0, probe)
    recorder.sample(9, loss=0.0)
    with reading(tmp_path) as reader:
        wait_for(reader, 3)
        recorder.sample(10, loss=0.0)
        recorder.close()
    records = reader.since()[0]
    assert [r.values for r in records if isinstance(r, Sample)].count({"memory_bytes": 5.0}) == 1
    (note,) = [r for r in records if isinstance(r, Event)]
    assert note.kind == "note"
    assert "no longer measured: OSError('the driver is gone')" in note.text
    assert records[-1].step == 10, "training goes on"


def test_nothing_is_measured_before_the_rank_knows_its_step(tmp_path: Path) -> None:
    """A rank that takes another's place, or goes on from a checkpoint, is not at step 0."""
    measured = threading.Event()

    def probe() -> dict[str, float]:
        measured.set()
        return {"memory_rss_bytes": 5.0}

    recorder = Recorder(tmp_path, 0, probe)
    assert not measured.wait(0.3)
    recorder.at(13)
    assert measured.wait(HANG_S)
    recorder.sample(14, loss=1.0, time_s=99.0)
    recorder.event("note", "of a checkpoint that took long to write", 12)
    recorder.close()
    with reading(tmp_path) as reader:
        records, _ = reader.since()
    samples = [record for record in records if isinstance(record, Sample)]
    assert {s.step for s in samples if "memory_rss_bytes" in s.values} <= {13, 14}
    assert [(s.time_s, s.step) for s in samples if "loss" in s.values] == [(99.0, 14)]


def _listeners() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_only_this_host_can_reach_a_rank(tmp_path: Path) -> None:
    before = _listeners()
    with recording(tmp_path):
        opened = _listeners() - before
        assert len(opened) == 1
        assert {ip for ip, _ in opened} == {"127.0.0.1"}


@contextmanager
def stranger(folder: Path, server_key: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber that knows the address, and another key or none."""
    address = json.loads((folder / "rank0.endpoint.json").read_text())["address"]
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    if server_key is not None:
        subscriber.curve_publickey, subscriber.curve_secretkey = zmq.curve_keypair()
        subscriber.curve_serverkey = server_key
    subscriber.subscribe(b"")
    subscriber.connect(address)
    try:
        yield subscriber
    finally:
        subscriber.close(0)
        context.term()


@pytest.mark.slow
@pytest.mark.parametrize("server_key", [None, zmq.curve_keypair()[0]], ids=["no key", "another key"])
def test_a_stranger_gets_nothing(tmp_path: Path, server_key: bytes | None) -> None:
    with (
        recording(tmp_path) as recorder,
        stranger(tmp_path, server_key) as subscriber,
        reading(tmp_path) as reader,
    ):
        for step in range(20):
            recorder.sample(step, loss=0.0)
            wait_for(reader, step + 1)
        assert not subscriber.poll(500)
        assert seqs(reader) == list(range(20)), "and the reader is not disturbed"


def test_garbage_on_the_socket_disturbs_nobody(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder, reading(tmp_path) as reader:
        address = json.loads((tmp_path / "rank0.endpoint.json").read_text())["address"]
        port = int(address.rsplit(":", 1)[1])
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            b"\xff" + bytes(8) + b"\x7f" + os.urandom(100),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
                connection.sendall(garbage)
            recorder.sample(0, loss=0.0)
        wait_for(reader, 3)
        assert seqs(reader) == [0, 1, 2]


def test_a_killed_rank_leaves_all_that_it_had_written(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from nbgpu.run_folder.recorder import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), 0)\n"
        "for step in range(100): recorder.sample(step, loss=0.0)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as rank:
        try:
            with reading(tmp_path) as reader:
                wait_for(reader, 100)
                rank.kill()
                rank.wait()
            assert seqs(reader) == list(range(100))
        finally:
            rank.kill()


def test_a_rank_that_takes_over_goes_on_where_the_killed_one_was_cut_off(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        with recording(tmp_path) as first:
            for step in range(3):
                first.sample(step, loss=0.0)
            wait_for(reader, 3)
        with record_path(tmp_path, 0).open("ab") as file:
            file.write(b'{"seq": 3, "time_s": 1.0, "st')  # as far as the killed one came
        with recording(tmp_path) as second:
            for step in range(3, 6):
                second.sample(step, loss=0.0)
            wait_for(reader, 6)
            # Through its own socket, and not only through the file, which is looked at once a second.
            wait_until(
                lambda: reader.statuses(CPUS)[0].silent_s < 0.3, "the reader hears the one that took over"
            )
    assert seqs(reader) == list(range(6))
    assert [record.step for record in reader.since()[0]] == list(range(6))


def test_rank_0_sees_the_newest_command(tmp_path: Path) -> None:
    watch = CommandWatch(tmp_path)
    assert watch.newest() is None
    send_command(tmp_path, "pause")
    assert watch.newest() == "pause"
    assert watch.newest() is None
    send_command(tmp_path, "pause")
    send_command(tmp_path, "resume")
    assert watch.newest() == "resume"


def test_a_stop_is_not_overruled(tmp_path: Path) -> None:
    watch = CommandWatch(tmp_path)
    send_command(tmp_path, "stop", why="the job has 2 min left")
    send_command(tmp_path, "resume")
    assert watch.newest() == "stop"
    assert watch.why_stop == "the job has 2 min left"


def test_a_pause_counts_whenever_it_was_asked_for_and_earlier_settings_do_not(tmp_path: Path) -> None:
    send_command(tmp_path, "pause")
    send_settings(tmp_path, {"lr": 0.1, "batch_size": 4})
    began_again_s = time.time()
    send_settings(tmp_path, {"lr": 0.2})
    watch = CommandWatch(tmp_path, settings_since_s=began_again_s)
    assert watch.newest() == "pause"
    assert watch.take_settings() == {"lr": 0.2}
    send_command(tmp_path, "resume")
    assert watch.newest() == "resume"
    assert CommandWatch(tmp_path, settings_since_s=time.time()).newest() == "resume"


def test_a_request_before_the_newest_change_of_its_setting_has_had_its_effect(tmp_path: Path) -> None:
    """The batch size was adapted to fewer ranks after the person had asked for another one."""
    send_settings(tmp_path, {"batch_size": 8, "lr": 0.1})
    note_change(tmp_path, 10, {"batch_size": 8})
    note_change(tmp_path, 20, {"batch_size": 1, "accumulate": 11})
    watch = CommandWatch(tmp_path)
    watch.newest()
    assert watch.take_settings() == {"lr": 0.1}
    send_settings(tmp_path, {"batch_size": 8})
    watch.newest()
    assert watch.take_settings() == {"batch_size": 8}


def test_what_ended_the_run_is_passed_over_once_it_begins_again(tmp_path: Path) -> None:
    send_settings(tmp_path, {"lr": 0.1})
    send_command(tmp_path, "stop")
    pass_over_earlier_requests(tmp_path)
    watch = CommandWatch(tmp_path)
    assert watch.newest() is None
    assert not watch.take_settings()
    send_command(tmp_path, "stop", why="just before rank 0 was replaced")
    # As the rank that takes over reads the requests, and as a rank that stays does in its new group.
    for _ in range(2):
        again = CommandWatch(tmp_path)
        assert again.newest() == "stop"
        assert again.why_stop == "just before rank 0 was replaced"


def test_requests_count_in_their_order_whichever_way_they_took(tmp_path: Path) -> None:
    run, cluster = tmp_path / "run", tmp_path / "cluster"
    cluster.mkdir()
    send_command(run, "pause", cluster)
    send_settings(run, {"lr": 0.1}, cluster)
    run.mkdir()  # as if the disk had room again
    send_settings(run, {"lr": 0.2}, cluster)
    send_command(run, "resume", cluster)
    watch = CommandWatch(run, cluster)
    assert watch.newest() == "resume"
    assert watch.take_settings() == {"lr": 0.2}


def test_a_command_takes_another_way_where_the_run_has_no_folder(tmp_path: Path) -> None:
    run, cluster = tmp_path / "run", tmp_path / "cluster"
    cluster.mkdir()
    watch = CommandWatch(run, cluster)
    assert watch.newest() is None
    send_command(run, "pause", cluster)
    assert watch.newest() == "pause"
    run.mkdir()
    send_command(run, "resume", cluster)
    assert watch.newest() == "resume"
    assert CommandWatch(tmp_path / "another", cluster).newest() is None
    with pytest.raises(FileNotFoundError):
        send_command(tmp_path / "gone", "stop")


def test_a_command_stands_whole_in_the_file_or_not_at_all(small_disk: Callable[[int], Path]) -> None:
    run = small_disk(2**20)
    watch = CommandWatch(run)
    send_command(run, "pause")
    ballast = (run / "ballast").open("wb", buffering=0)
    with ballast, suppress(OSError):
        while True:
            ballast.write(bytes(2**12))
    # The file's last block has room for some of them.
    told = "".join(_why_not_sent(run) for _ in range(2**10))
    assert "No space left" in told
    (run / "ballast").unlink()
    send_command(run, "stop")
    assert watch.newest() == "stop"


def _why_not_sent(run: Path) -> str:
    try:
        send_command(run, "resume")
    except OSError as error:
        return str(error)
    return ""


def test_half_a_command_waits_for_its_other_half(tmp_path: Path) -> None:
    watch = CommandWatch(tmp_path)
    send_command(tmp_path, "pause")
    path = tmp_path / "commands.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert watch.newest() is None
    path.write_bytes(whole)
    assert watch.newest() == "pause"


def test_a_reader_that_waits_for_its_ranks_takes_no_cpu_time(tmp_path: Path) -> None:
    """A poller with no socket does not wait at all, and a loop around it would keep a core busy."""
    reader = Reader(tmp_path, world_size=2)
    try:
        before_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before_s < 0.5
    finally:
        reader.close()


def test_what_finds_no_room_on_the_disk_is_written_when_there_is_room(
    small_disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_disk(64 * 1024)
    filler = folder / "filler"
    with recording(folder) as recorder, reading(folder) as reader:
        filler.write_bytes(bytes(48 * 1024))
        for step in range(500):
            recorder.sample(step, loss=1 / 3)
        wait_until(lambda: "No space left on device" in caplog.text, "the disk is full")
        num_written = record_path(folder, 0).read_bytes().count(b"\n")
        assert num_written < 500
        filler.unlink()
        wait_for(reader, 501)
        assert seqs(reader) == list(range(501))
        told = [r.text for r in reader.since()[0] if isinstance(r, Event)]
    assert told == [
        f"{record_path(folder, 0)} cannot be written now, and is kept in memory: No space left on device"
    ]
