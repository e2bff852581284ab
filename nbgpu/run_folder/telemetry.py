"""How numbers get from a rank to the notebook: a Recorder in each rank writes, a Reader in the client reads.

The rank appends JSON lines to `rankN.jsonl` in the run's folder and publishes the very same bytes on a ZMQ
socket. The file is the record, the socket is the speed: records are counted, and whatever the socket lost
(a late subscriber, a full queue, a restarted kernel) is read from the file, so that the reader's history has
no gap and no repetition. The socket listens on loopback only and speaks Curve; its public key, without which
nobody gets a byte, stands in `rankN.endpoint.json` in the run's folder, which only the user can enter.
"""

from __future__ import annotations

import errno
import heapq
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import zmq

from nbgpu.errors import RunError
from nbgpu.machine.files import write_whole
from nbgpu.protocol.bounds import MAX_NUMBER, is_time
from nbgpu.protocol.records import (
    DAMAGE,
    PROFILE_PARTS,
    STATES_OF_NO_STEP,
    Command,
    Device,
    Event,
    RankStatus,
    RunState,
    Sample,
)
from nbgpu.run_folder import lines
from nbgpu.run_folder.metrics_table import STEP_SERIES

_log = logging.getLogger("nbgpu.telemetry")

FLUSH_PERIOD_S = 0.05
PROBE_PERIOD_S = 1.0
HEARTBEAT_PERIOD_S = 0.5
_POLL_PERIOD_MS = 100
_HEARTBEAT = b"\n"
_READ_BYTES = 2**22

WINDOW = 4096
"""Records of each rank that a Reader keeps in memory, the newest ones; those before them are read from the files again. A
record takes about 700 bytes there, and a week of eight ranks would have ten million of them."""

_COMMANDS = "commands.jsonl"
_FLOAT, _NUMBERS = {float}, {float, int}

Record = Sample | Event

Cursor = tuple[int, ...]
"""How many records of each rank somebody has taken from a Reader."""
START: Cursor = ()
"""The cursor of who has none."""


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _endpoint_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.endpoint.json"


def _make_whole(path: Path) -> int:
    """Ends a file of records after its last whole line, and returns how many it has.

    A rank that takes the place of a killed one goes on with its file, whose last line may be half written.
    """
    if not path.exists():
        return 0
    records = path.read_bytes()
    end = records.rfind(b"\n") + 1
    if end < len(records):
        os.truncate(path, end)
    return records.count(b"\n")


class Recorder:
    """Writes one rank's samples and events; a thread of its own does the input and output.

    The main thread only appends to a list, so that telemetry costs a step nothing that can be noticed, and the
    thread keeps sending while the main thread waits in a collective.

    Args:
        folder: the run's folder, which exists.
        rank: whose records these are.
        probe: called about once a second on the recorder's thread, from the first record or `at` on; returns series
            such as memory and utilization. An exception in it ends up as a 'note' event once, and stops the probing.
    """

    def __init__(
        self, folder: Path, rank: int, probe: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self._rank = rank
        self._probe = probe
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._seq = _make_whole(record_path(folder, rank))
        self._step: int | None = None
        """What the probe's samples belong to. A rank that takes another's place, or goes on from a checkpoint, does not
        begin at step 0, and nothing is measured before its step is known."""
        self._unwritten = bytearray()
        self._full_disk_told = False
        self._closing = threading.Event()
        self._file = record_path(folder, rank).open("ab", buffering=0)
        # A context of its own: the engine's context belongs to ipyparallel, and closing it is theirs to do.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        public_key, secret_key = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey = public_key
        self._socket.curve_secretkey = secret_key
        self._socket.linger = 1000
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        endpoint = {"address": f"tcp://127.0.0.1:{port}", "public_key": public_key.decode()}
        path = _endpoint_path(folder, rank)
        try:
            write_whole(path, json.dumps(endpoint), mode=0o600)
        except OSError as error:
            # Whoever reads finds the records in the file, and later.
            self.event("note", f"{path} cannot be written, so that curves come late: {error.strerror}")
        self._thread = threading.Thread(
            target=self._send_until_closed, name=f"nbgpu-recorder-{rank}", daemon=True
        )
        self._thread.start()

    def at(self, step: int) -> None:
        """Says how many optimizer steps are done now, for what the probe measures from here on."""
        with self._lock:
            self._step = step

    def sample(self, step: int, *, time_s: float | None = None, **values: float) -> None:
        """Records numbers measured when `step` optimizer steps were done.

        Args:
            step: optimizer steps.
            time_s: when they were measured, where that was not now; seconds since the epoch.
            values: by series.
        """
        self._append(step, {"values": values}, time_s)

    def event(self, kind: str, text: str, step: int | None = None, **detail: Any) -> None:
        """Records that something happened; `detail` must be JSON."""
        self._append(step, {"kind": kind, "text": text, "detail": detail})

    def state(self, state: RunState, step: int | None = None, **detail: Any) -> None:
        """Records that the rank is now loading, training, paused and so on."""
        self.event("state", state, step, **detail)

    def close(self) -> None:
        """Sends what is waiting, then closes file, socket and thread."""
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._context.term()
        self._file.close()

    def _append(self, step: int | None, fields: dict[str, Any], time_s: float | None = None) -> None:
        time_s = time.time() if time_s is None else time_s
        with self._lock:
            if step is None:
                step = self._step or 0
            else:
                # A checkpoint is told when it is written, which may be some steps after its own.
                self._step = step if self._step is None else max(self._step, step)
            line = json.dumps({"seq": self._seq, "time_s": time_s, "step": step, **fields})
            self._seq += 1
            self._waiting.append(line.encode() + b"\n")

    def _send_until_closed(self) -> None:
        last_probe_s = last_sent_s = 0.0
        while True:
            closing = self._closing.wait(FLUSH_PERIOD_S)
            now_s = time.monotonic()
            if self._probe is not None and self._step is not None and now_s - last_probe_s >= PROBE_PERIOD_S:
                last_probe_s = now_s
                self._append_probe()
            with self._lock:
                waiting, self._waiting = self._waiting, []
            if waiting:
                batch = b"".join(waiting)
                self._unwritten += batch
            if self._unwritten:
                self._write()
            if waiting:
                self._socket.send(batch)
                last_sent_s = now_s
            elif now_s - last_sent_s >= HEARTBEAT_PERIOD_S:
                self._socket.send(_HEARTBEAT)
                last_sent_s = now_s
            if closing:
                self._say_what_is_lost()
                return

    def _write(self) -> None:
        """Appends to the file what fits on the disk. The rest is kept, and tried again the next time."""
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._full_disk_told:
                self._full_disk_told = True
                text = f"{self._file.name} cannot be written now, and is kept in memory: {error.strerror}"
                _log.warning(text)
                self.event("note", text)

    def _say_what_is_lost(self) -> None:
        self._write()
        if self._unwritten:
            _log.error("%s lacks its last %d bytes: the disk is full", self._file.name, len(self._unwritten))

    def _append_probe(self) -> None:
        assert self._probe is not None
        try:
            values = self._probe()
        except Exception as error:  # noqa: BLE001 - a driver may raise anything, and training must go on
            self._probe = None
            self.event("note", f"memory and utilization are no longer measured: {error!r}")
        else:
            self._append(None, {"values": dict(values)})


def parse(rank: int, line: bytes) -> Record:
    """One line of `rankN.jsonl` as a record.

    Raises:
        ValueError: it is not what a Recorder writes.
    """
    fields = lines.decode(line)
    try:
        record = Event(rank=rank, **fields) if "kind" in fields else Sample(rank=rank, **fields)
    except TypeError as error:
        raise ValueError(str(error)) from None
    seq, step, time_s = record.seq, record.step, record.time_s
    if type(seq) is not int or type(step) is not int or not (0 <= step <= MAX_NUMBER and is_time(time_s)):
        raise ValueError("seq, time_s or step is no number of its kind")
    if isinstance(record, Event):
        _require_event(record)
    elif not _are_numbers(record.values):
        raise ValueError("values are not numbers by series")
    return record


def _are_numbers(values: object) -> bool:
    """Whether these can be the numbers of a sample. A loss may be NaN or infinite; what is measured of each step may not."""
    if type(values) is not dict:
        return False
    types = {*map(type, values.values())}
    if not types <= _FLOAT and not (types <= _NUMBERS and all(map(_fits_a_float, values.values()))):
        return False
    if STEP_SERIES not in values:
        return True
    known: dict[str, float] = values
    get = known.get
    # Four comparisons, because a loop over the names takes longer than all of the rest.
    return (
        0 <= known[STEP_SERIES] <= MAX_NUMBER
        and 0 <= get("samples_per_s", -1) <= MAX_NUMBER
        and 0 <= get("compute_s", 0) <= MAX_NUMBER
        and 0 <= get("data_s", 0) <= MAX_NUMBER
    )


def _fits_a_float(value: float) -> bool:
    return isinstance(value, float) or abs(value) <= MAX_NUMBER


def _require_event(event: Event) -> None:
    """Raises ValueError where an event lacks what those who show it ask for."""
    if not (isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.detail, dict)):
        raise ValueError("kind, text or detail is of another type")
    lines.require_shallow(event.detail)
    if event.kind == "state" and event.text not in get_args(RunState):
        raise ValueError(f"{event.text!r} is no state")
    if event.kind == "pictures" and not isinstance(event.detail.get("images"), dict):
        raise ValueError("the event has no pictures")
    if event.kind == "profile":
        seconds = [event.detail.get(f"{part}_s") for part in PROFILE_PARTS]
        step_s, steps = event.detail.get("step_s"), event.detail.get("steps")
        if not (all(map(is_time, [step_s, *seconds])) and step_s and type(steps) is list and len(steps) == 2):
            raise ValueError("the event has no times of steps")


def _parse_or_mark(rank: int, line: bytes, number: int) -> Record:
    """A line of a file as a record; an event of the kind DAMAGE stands for one that cannot be read.

    Args:
        rank: whose file it is.
        line: without its end.
        number: how many lines stand before it, which is the record's `seq`.
    """
    try:
        return parse(rank, line)
    except ValueError:
        return Event(rank=rank, seq=number, time_s=0.0, step=0, kind=DAMAGE, text="")


class Tail:
    """Reads the file of one rank piece by piece, and keeps nothing of it.

    Args:
        folder: the run's folder.
        rank: whose records.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = record_path(folder, rank)
        self._rank = rank
        self._offset_bytes = 0
        self._num_lines = 0

    def new(self) -> list[Record]:
        """The records since the last call; empty where the rank has not begun to write.

        Raises:
            RunError: there is something else than a file, or it cannot be opened.
        """
        try:
            with lines.open_file(self._path) as file:
                file.seek(self._offset_bytes)
                new = lines.whole(file.read())
        except FileNotFoundError:
            return []
        self._offset_bytes += sum(map(len, new)) + len(new)
        begin, self._num_lines = self._num_lines, self._num_lines + len(new)
        return [_parse_or_mark(self._rank, line, number) for number, line in enumerate(new, begin)]


@dataclass
class _RankSource:
    """How far one rank's file has been read, and the socket that runs ahead of it."""

    rank: int
    path: Path
    offset_bytes: int = 0
    num_taken: int = 0
    """Records taken, which is lines: an event of the kind DAMAGE stands for each that cannot be read."""
    newest: deque[Record] = field(default_factory=deque)
    """The newest of those, without a gap."""
    places_bytes: list[int] = field(default_factory=list)
    """Where each WINDOWth record begins in the file."""
    damaged_lines: list[int] = field(default_factory=list)
    """The numbers of the file's lines that cannot be read, counted from 1."""
    torn_lines: list[int] = field(default_factory=list)
    """Those whose records do not follow on the records of the lines before them."""
    shift: int = 0
    """By how much a record's `seq` differs from the number of lines before it; 0 in a file as a rank writes it."""
    socket: zmq.Socket[bytes] | None = None
    endpoint: bytes = b""
    """Where the socket is connected to; a rank that is replaced has another one."""
    heard_mono_s: float = field(default_factory=time.monotonic)
    read_mono_s: float = 0.0


def _damage_of(source: _RankSource) -> list[str]:
    sentences = []
    if source.damaged_lines:
        named = lines.passed_over(source.path, source.damaged_lines)
        sentences.append(f"{named}: curves, tables and events lack what stood there")
    if source.torn_lines:
        first, num_more = source.torn_lines[0], len(source.torn_lines) - 1
        more = f" (nor do {num_more} more lines)" if num_more else ""
        sentences.append(
            f"line {first} of {source.path} does not follow on the line before it{more}: lines were taken out, added or moved, "
            "so that curves, tables and events are not as the rank recorded them"
        )
    return sentences


class Reader:
    """Follows every rank of a run, or reads a run that is over.

    Of the samples it keeps the newest in memory (WINDOW), of the events all. What is older is read from the files when
    somebody asks for it.

    Args:
        folder: the run's folder.
        world_size: how many ranks write there.
        live: whether a thread follows the sockets. What stands in the files is read now in either case.

    Lines of the files that cannot be read are passed over; a warning is logged, and `damage` says which.

    Raises:
        RunError: something else than a file has a file's name, or a file cannot be opened.
    """

    def __init__(self, folder: Path, world_size: int, live: bool = True) -> None:
        self._folder = folder
        self._sources = [_RankSource(rank, record_path(folder, rank)) for rank in range(world_size)]
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._states: list[RunState] = ["starting"] * world_size
        self._steps = [0] * world_size
        self._values: list[dict[str, float]] = [{} for _ in range(world_size)]
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        for source in self._sources:
            self._read_file(source)
        if live:
            self._thread = threading.Thread(target=self._follow, name="nbgpu-reader", daemon=True)
            self._thread.start()

    def since(self, cursor: Cursor = START) -> tuple[list[Record], Cursor]:
        """All records that arrived after `cursor`, in the order of their times, and the cursor for the next call. Of a long
        run they may be more than there is memory for; `batches` gives them piece by piece."""
        records: list[Record] = []
        behind = cursor or (0,) * len(self._sources)
        for batch, now in self.batches(cursor):
            records += batch
            behind = now
        return records, behind

    def batches(self, cursor: Cursor = START) -> Iterator[tuple[list[Record], Cursor]]:
        """The records that arrived after `cursor`, at most WINDOW of each rank at a time, each time with the cursor for the
        next call. In a batch they are in the order of their times."""
        taken = list(cursor or (0,) * len(self._sources))
        while True:
            by_rank = [self._after(source, taken[source.rank]) for source in self._sources]
            if not any(by_rank):
                return
            for rank, records in enumerate(by_rank):
                taken[rank] += len(records)
            yield list(heapq.merge(*by_rank, key=lambda record: record.time_s)), tuple(taken)

    def records(self) -> Iterator[Record]:
        """All records so far, as `batches` gives them, one by one."""
        return (record for batch, _ in self.batches() for record in batch)

    def events(self) -> list[Event]:
        """All that has happened on the ranks so far, in the order in which it was heard of."""
        with self._lock:
            return list(self._events)

    def damage(self) -> list[str]:
        """Says which lines of the files were passed over, or are not as the ranks wrote them: a sentence or two for each
        file, and none where all is well."""
        with self._lock:
            return [sentence for source in self._sources for sentence in _damage_of(source)]

    def _after(self, source: _RankSource, count: int) -> list[Record]:
        """At most WINDOW records of a rank, from the one with this number on."""
        with self._lock:
            num_behind = source.num_taken - count
            if num_behind <= len(source.newest):
                first = len(source.newest) - num_behind
                last = min(len(source.newest), first + WINDOW)
                return [source.newest[i] for i in range(first, last)]
            index = count // WINDOW
            begin_bytes = source.places_bytes[index]
            is_last = index + 1 == len(source.places_bytes)
            end_bytes = source.offset_bytes if is_last else source.places_bytes[index + 1]
        with lines.open_file(source.path) as file:
            file.seek(begin_bytes)
            read = lines.whole(file.read(end_bytes - begin_bytes))[count - index * WINDOW :]
        return [_parse_or_mark(source.rank, line, number) for number, line in enumerate(read, count)]

    def statuses(self, devices: tuple[Device, ...]) -> list[RankStatus]:
        """The last known of every rank, in order."""
        now_s = time.monotonic()
        with self._lock:
            return [
                RankStatus(
                    rank=s.rank,
                    state=self._states[s.rank],
                    step=self._steps[s.rank],
                    device=devices[s.rank],
                    silent_s=now_s - s.heard_mono_s if self._thread else 0.0,
                    values=dict(self._values[s.rank]),
                )
                for s in self._sources
            ]

    def close(self) -> None:
        """Reads the files to their end and stops following; what was read stays readable."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join()
        self._thread = None

    def _follow(self) -> None:
        context = zmq.Context()
        poller = zmq.Poller()
        try:
            while not self._closing.is_set():
                for source in self._sources:
                    if (
                        source.socket is None
                        or time.monotonic() - source.heard_mono_s > 2 * HEARTBEAT_PERIOD_S
                    ):
                        self._connect(context, poller, source)
                if all(source.socket is None for source in self._sources):
                    # A poller with nothing to poll returns at once, and this loop would take a core.
                    self._closing.wait(_POLL_PERIOD_MS / 1000)
                for socket, _ in poller.poll(_POLL_PERIOD_MS):
                    source = next(s for s in self._sources if s.socket is socket)
                    self._receive(source)
                for source in self._sources:
                    # A subscriber that comes late misses messages without knowing: look at the file as well.
                    if time.monotonic() - source.read_mono_s > 1.0:
                        self._read_file(source)
            for source in self._sources:
                self._read_file(source)
        finally:
            for source in self._sources:
                if source.socket is not None:
                    source.socket.close(0)
            context.term()

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, source: _RankSource
    ) -> None:
        path = _endpoint_path(self._folder, source.rank)
        try:
            with lines.open_file(path) as file:
                text = file.read()
        except (FileNotFoundError, RunError):  # what the file of records says comes without it too
            return
        if text == source.endpoint:
            return
        if source.socket is not None:
            poller.unregister(source.socket)
            source.socket.close(0)
        source.endpoint = text
        socket = context.socket(zmq.SUB)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.subscribe(b"")
        try:
            endpoint = lines.decode(text)
            socket.curve_serverkey = endpoint["public_key"].encode()
            socket.connect(endpoint["address"])
        except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
            _log.warning(
                "%s is not what nbgpu writes (%s): the curves of this rank come once a second", path, error
            )
            socket.close(0)
            source.socket = None
            return
        poller.register(socket, zmq.POLLIN)
        source.socket = socket

    def _receive(self, source: _RankSource) -> None:
        assert source.socket is not None
        batch = source.socket.recv()
        source.heard_mono_s = time.monotonic()
        if batch != _HEARTBEAT and not self._take(source, batch, is_file=False):
            self._read_file(source)

    def _read_file(self, source: _RankSource) -> None:
        source.read_mono_s = time.monotonic()
        try:
            file = lines.open_file(source.path)
        except FileNotFoundError:  # the rank has not begun to write
            return
        known = len(source.damaged_lines), len(source.torn_lines)
        with file:
            while True:
                file.seek(source.offset_bytes)
                batch = file.read(_READ_BYTES)
                # The rank may be in the middle of a write: its last line counts once it is whole.
                if b"\n" not in batch and len(batch) == _READ_BYTES:
                    batch += file.readline()
                begin_bytes = source.offset_bytes
                self._take(source, batch, is_file=True)
                # While the disk is full, what was heard does not stand in the file.
                if source.offset_bytes <= os.fstat(file.fileno()).st_size:
                    with self._lock:
                        while len(source.newest) > WINDOW:
                            source.newest.popleft()
                if source.offset_bytes == begin_bytes:
                    break
        if known != (len(source.damaged_lines), len(source.torn_lines)):
            _log.warning("%s", "\n".join(_damage_of(source)))

    def _take(self, source: _RankSource, batch: bytes, is_file: bool) -> bool:
        """Takes the records that are next in turn; False if one before them is missing.

        Args:
            source: what they come from.
            batch: lines; what stands behind the last whole one counts once it is whole.
            is_file: the batch begins with the first line of the file that was not taken. It has what there is, so that
                its records are taken whatever their `seq` says. A socket repeats some, and loses some.
        """
        taken: list[Record] = []
        places_bytes: list[int] = []
        damaged_lines: list[int] = []
        torn_lines: list[int] = []
        num_taken, offset_bytes, shift = source.num_taken, source.offset_bytes, source.shift
        complete = True
        for line in lines.whole(batch):
            record = _parse_or_mark(source.rank, line, num_taken)
            is_damage = isinstance(record, Event) and record.kind == DAMAGE
            if is_damage and is_file:
                damaged_lines.append(num_taken + 1)
            elif is_damage:
                complete = False
                break
            elif record.seq != num_taken + shift:
                if is_file:
                    shift = record.seq - num_taken
                    torn_lines.append(num_taken + 1)
                elif record.seq < num_taken + shift:
                    continue
                else:
                    complete = False
                    break
            if num_taken % WINDOW == 0:
                places_bytes.append(offset_bytes)
            num_taken += 1
            offset_bytes += len(line) + 1
            taken.append(record)
        with self._lock:
            source.num_taken, source.offset_bytes, source.shift = num_taken, offset_bytes, shift
            source.places_bytes += places_bytes
            source.damaged_lines += damaged_lines
            source.torn_lines += torn_lines
            source.newest.extend(taken)
            for record in taken:
                if isinstance(record, Event):
                    if record.kind == DAMAGE:
                        continue
                    self._events.append(record)
                self._steps[source.rank] = max(self._steps[source.rank], record.step)
                if isinstance(record, Sample):
                    self._values[source.rank].update(record.values)
                elif record.kind == "state":
                    self._states[source.rank] = cast(RunState, record.text)
                    if record.text not in STATES_OF_NO_STEP:
                        # With its weights spread over the ranks a run may go back, to its newest checkpoint.
                        self._steps[source.rank] = record.step
        return complete


def send_command(folder: Path, command: Command, cluster_folder: Path | None = None) -> None:
    """Asks a run to pause, go on or stop: one line in `commands.jsonl`, which rank 0 watches.

    A file and not a socket, because it works the same for a run that torchrun started, is protected as the
    run's folder is, and stays as a record of what was asked and when.

    Args:
        folder: the run's.
        cluster_folder: takes the line where the run's folder cannot: it was deleted, or its disk is full or read-only.

    Raises:
        OSError: neither folder can be written.
    """
    _send(folder, {"command": command}, cluster_folder)


def send_settings(folder: Path, values: Mapping[str, Any], cluster_folder: Path | None = None) -> None:
    """Asks a run to go on with other settings, as `send_command` does. `values` are JSON, by field."""
    _send(folder, {"set": dict(values)}, cluster_folder)


def _send(folder: Path, asked: dict[str, Any], cluster_folder: Path | None) -> None:
    line = json.dumps({"time_s": time.time(), **asked}).encode() + b"\n"
    try:
        _append_whole(folder / _COMMANDS, line)
    except OSError:
        if cluster_folder is None:
            raise
        _append_whole(_commands_beside(cluster_folder, folder), line)


def _append_whole(path: Path, line: bytes) -> None:
    """Appends a line, or nothing of it: half a line on a full disk would spoil the next one."""
    with path.open("ab", buffering=0) as file:
        size_bytes = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size_bytes)
            raise


def _commands_beside(cluster_folder: Path, folder: Path) -> Path:
    """Where the commands to a run are whose own folder cannot be written."""
    return cluster_folder / f"{folder.name}.{_COMMANDS}"


class CommandWatch:
    """Rank 0's view of what was asked of a run: the newest command, and new settings.

    Args:
        folder: the run's.
        cluster_folder: as for `send_command`.
    """

    def __init__(self, folder: Path, cluster_folder: Path | None = None) -> None:
        paths = [folder / _COMMANDS]
        if cluster_folder is not None:
            paths.append(_commands_beside(cluster_folder, folder))
        self._offsets_bytes = dict.fromkeys(paths, 0)
        self._settings: dict[str, Any] = {}

    @property
    def has_settings(self) -> bool:
        """Whether `newest` has come across settings that nobody has taken."""
        return bool(self._settings)

    def take_settings(self) -> dict[str, Any]:
        """What `newest` came across since it was taken last; of a field that was set twice the newer value."""
        taken, self._settings = self._settings, {}
        return taken

    def newest(self) -> Command | None:
        """The newest command since the last call, or None; a stop is never overruled by what follows it."""
        asked = [fields for path in self._offsets_bytes for fields in self._new_in(path)]
        for fields in asked:
            self._settings |= fields.get("set", {})
        commands: list[Command] = [fields["command"] for fields in asked if "command" in fields]
        if "stop" in commands:
            return "stop"
        return commands[-1] if commands else None

    def _new_in(self, path: Path) -> list[dict[str, Any]]:
        try:
            if path.stat().st_size <= self._offsets_bytes[path]:
                return []
            with path.open("rb") as file:
                file.seek(self._offsets_bytes[path])
                batch = file.read()
        except OSError:  # nothing was asked yet, or the folder is gone
            return []
        new = lines.whole(batch)
        self._offsets_bytes[path] += sum(map(len, new)) + len(new)
        asked = [_request(line) for line in new]
        if None in asked:
            _log.warning(
                "%s of the new lines of %s are not what nbgpu writes, and were passed over",
                asked.count(None),
                path,
            )
        return [fields for fields in asked if fields is not None]


def _request(line: bytes) -> dict[str, Any] | None:
    """What a line of `commands.jsonl` asks for; None where it is not what nbgpu writes."""
    try:
        fields = lines.decode(line)
    except ValueError:
        return None
    is_known = (
        isinstance(fields, dict)
        and fields.get("command", "stop") in get_args(Command)
        and isinstance(fields.get("set", {}), dict)
    )
    return fields if is_known else None
