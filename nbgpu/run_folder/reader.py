"""Reads the records of all ranks of a run: from their sockets while the run goes on, and from their files."""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import cast

import zmq

from nbgpu.errors import RunError
from nbgpu.protocol.records import DAMAGE, STATES_OF_NO_STEP, Device, Event, RankStatus, RunState, Sample
from nbgpu.run_folder import lines
from nbgpu.run_folder.rank_files import (
    HEARTBEAT,
    HEARTBEAT_PERIOD_S,
    Record,
    endpoint_path,
    parse_or_mark,
    record_path,
)

_log = logging.getLogger("nbgpu.telemetry")

_POLL_PERIOD_MS = 100
_READ_BYTES = 2**22

WINDOW = 4096
"""The number of newest records of each rank that a Reader keeps in memory; it reads older ones from the files
again. A record takes about 700 bytes of memory, and a week of eight ranks has ten million records. With eight
ranks the Reader took at most 76 MiB, after 50,000 steps and after 100,000."""

Cursor = tuple[int, ...]
"""How many records of each rank were taken from a Reader."""
START: Cursor = ()
"""The cursor before the first record."""


@dataclass
class _RankSource:
    """What the Reader has read of one rank: the offset in the rank's file, its newest records and values, and
    its socket, which delivers records before they are in the file."""

    rank: int
    path: Path
    offset_bytes: int = 0
    """The offset in the file behind the last record taken."""
    num_taken: int = 0
    """The number of records taken, which is that of lines: an event of the kind DAMAGE stands for each line
    that cannot be read."""
    newest: deque[Record] = field(default_factory=deque)
    """The newest records, without a gap."""
    places_bytes: list[int] = field(default_factory=list)
    """The offset in the file of every WINDOWth record: of number 0, WINDOW, 2 WINDOW and so on."""
    damaged_lines: list[int] = field(default_factory=list)
    """The numbers of the file's lines that cannot be read, counted from 1."""
    torn_lines: list[int] = field(default_factory=list)
    """The numbers of lines whose `seq` is not one more than that of the line before."""
    shift: int = 0
    """A record's `seq` minus the number of lines before the record; 0 in a file that nobody has edited."""
    socket: zmq.Socket[bytes] | None = None
    endpoint: bytes = b""
    """The content of the endpoint file to which the socket is connected; a rank that is replaced writes
    another one."""
    heard_mono_s: float = field(default_factory=time.monotonic)
    """When the last message of the rank arrived, by `time.monotonic`."""
    read_mono_s: float = 0.0
    """When the file was read last, by `time.monotonic`."""
    reported: set[str] = field(default_factory=set)
    """The errors with this rank's files and socket that were logged already."""
    state: RunState = "starting"
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    """The newest value of each series."""
    progress: tuple[int, int] = (0, 0)
    """The number of samples of the result that the rank has evaluated, and the number of all of them."""


def _new_progress(record: Event, before: tuple[int, int]) -> tuple[int, int]:
    """Return the `progress` of a rank after the record of a state: the numbers in the record if it has them;
    `before`, the earlier progress, if the rank is still evaluating the result; else (0, 0)."""
    done, total = record.detail.get("done"), record.detail.get("total")
    if isinstance(done, int) and isinstance(total, int) and 0 <= done <= total:
        return done, total
    return before if record.text in ("working out the result", "waiting for rank 0") else (0, 0)


def _damage_sentences(source: _RankSource) -> list[str]:
    """Return sentences about the lines of a rank's file that cannot be read or are out of order."""
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


@contextmanager
def _reporting(source: _RankSource) -> Iterator[None]:
    """Log an error of the block, each message once for this rank, and do not raise it: the reader's thread
    tries again, and has other ranks to follow."""
    try:
        yield
    except (OSError, RunError, zmq.ZMQError) as error:
        if str(error) not in source.reported:
            source.reported.add(str(error))
            _log.warning("the records of rank %d come late: %s", source.rank, error)


class Reader:
    """Follows every rank of a run, or reads a run that is over.

    The reader keeps the newest samples in memory (WINDOW), and all events. Older samples are read from the
    files when a caller asks for them.

    Args:
        folder: the run's folder.
        world_size: the number of ranks that write there.
        live: whether a thread follows the sockets. The files are read now in either case.

    Lines of the files that cannot be read are skipped; a warning is logged, and `damage` says which.

    Raises:
        RunError: the path of a file is not a regular file, or cannot be opened.
    """

    def __init__(self, folder: Path, world_size: int, live: bool = True) -> None:
        """Read the files, and start the thread that follows the ranks if `live`."""
        self.folder = folder
        self._sources = [_RankSource(rank, record_path(folder, rank)) for rank in range(world_size)]
        self._num_ranks = world_size
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._heard: deque[tuple[_RankSource, bytes]] = deque()
        """Batches of lines from ranks on other hosts, for the thread to take."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        for source in self._sources:
            self._read_file(source)
        if live:
            self._thread = threading.Thread(target=self._follow, name="nbgpu-reader", daemon=True)
            self._thread.start()

    def keep_only(self, num_ranks: int) -> None:
        """Return from now on the records of the first `num_ranks` ranks only, because the run has lost the
        others, and their last step must not count as the step of the run. Events of lost ranks stay. When
        ranks come back, this is called again with the larger number."""
        self._num_ranks = num_ranks

    def since(self, cursor: Cursor = START) -> tuple[list[Record], Cursor]:
        """Return all records that arrived after `cursor`, in the order of their times, and the cursor for the
        next call. The records of a long run may not fit into memory; `batches` yields them piece by piece."""
        records: list[Record] = []
        end = cursor or (0,) * len(self._sources)
        for batch, batch_end in self.batches(cursor):
            records += batch
            end = batch_end
        return records, end

    def batches(self, cursor: Cursor = START) -> Iterator[tuple[list[Record], Cursor]]:
        """Yield the records that arrived after `cursor`, at most WINDOW of each rank at a time, each time
        with the cursor for the next call. A batch is in the order of the records' times."""
        taken = list(cursor or (0,) * len(self._sources))
        while True:
            kept = self._sources[: self._num_ranks]
            by_rank = [self._after(source, taken[source.rank]) for source in kept]
            if not any(by_rank):
                return
            for rank, records in enumerate(by_rank):
                taken[rank] += len(records)
            yield list(heapq.merge(*by_rank, key=lambda record: record.time_s)), tuple(taken)

    def records(self) -> Iterator[Record]:
        """Yield all records so far, one by one: in pieces of WINDOW records of each rank, each piece in order
        of time."""
        return (record for batch, _ in self.batches() for record in batch)

    def events(self) -> list[Event]:
        """Return all events of the ranks so far, in the order in which they arrived here."""
        with self._lock:
            return list(self._events)

    def damage(self) -> list[str]:
        """Return a sentence or two for each file that has unreadable lines, or lines that were added, moved
        or taken out."""
        with self._lock:
            return [sentence for source in self._sources for sentence in _damage_sentences(source)]

    def _after(self, source: _RankSource, count: int) -> list[Record]:
        """Return at most WINDOW records of a rank, beginning with number `count`, counted from 0: from memory
        if they are among the newest, else from the file."""
        with self._lock:
            num_behind = source.num_taken - count
            if num_behind <= len(source.newest):
                begin = len(source.newest) - num_behind
                return list(islice(source.newest, begin, begin + WINDOW))
            # The file is read between the noted offsets before and after record number `count`.
            index = count // WINDOW
            begin_bytes, end_bytes, *_ = (*source.places_bytes[index : index + 2], source.offset_bytes)
        with lines.open_file(source.path) as file:
            file.seek(begin_bytes)
            read = lines.whole(file.read(end_bytes - begin_bytes))[count - index * WINDOW :]
        return [parse_or_mark(source.rank, line, number) for number, line in enumerate(read, count)]

    def statuses(self, devices: tuple[Device, ...]) -> list[RankStatus]:
        """Return the last known status of each rank that has one of these devices, in order. A run may have
        lost ranks."""
        now_s = time.monotonic()
        with self._lock:
            return [
                RankStatus(
                    rank=s.rank,
                    state=s.state,
                    step=s.step,
                    device=device,
                    silent_s=now_s - s.heard_mono_s if self._thread else 0.0,
                    values=dict(s.values),
                    done=s.progress[0],
                    total=s.progress[1],
                )
                for s, device in zip(self._sources, devices, strict=False)
            ]

    def offset_bytes(self, rank: int) -> int:
        """Return the number of bytes of a rank's file that have been read."""
        return self._sources[rank].offset_bytes

    def hear(self, rank: int, batch: bytes = b"") -> None:
        """Take lines of a rank on another host, to whose socket this process does not connect. An empty batch
        says only that the rank is alive."""
        source = self._sources[rank]
        source.heard_mono_s = time.monotonic()
        if batch:
            self._heard.append((source, batch))

    def look_at(self, rank: int) -> None:
        """Make the thread read the file of a rank at once, because something was written to it."""
        self._sources[rank].read_mono_s = 0.0

    def close(self) -> None:
        """Read the files to their end and stop the thread. The records stay available."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join()
        self._thread = None

    def _follow(self) -> None:
        """Receive records from the ranks' sockets until `close`, and read the files once a second as well.
        Runs on the reader's thread, because a ZMQ socket may be used by one thread only."""
        context = zmq.Context()
        poller = zmq.Poller()
        try:
            while not self._closing.is_set():
                # Connect to ranks that have begun, and to those that may have replaced a silent rank.
                for source in self._sources:
                    silent_s = time.monotonic() - source.heard_mono_s
                    if source.socket is None or silent_s > 2 * HEARTBEAT_PERIOD_S:
                        with _reporting(source):
                            self._connect(context, poller, source)
                if all(source.socket is None for source in self._sources):
                    # A poller with nothing to poll returns at once, and this loop would take a core.
                    self._closing.wait(_POLL_PERIOD_MS / 1000)
                for socket, _ in poller.poll(_POLL_PERIOD_MS):
                    source = next(s for s in self._sources if s.socket is socket)
                    with _reporting(source):
                        self._receive(source)
                # Records of ranks on other hosts, which `hear` has got.
                while self._heard:
                    heard, batch = self._heard.popleft()
                    with _reporting(heard):
                        if not self._take(heard, batch, is_file=False):
                            self._read_file(heard)
                for source in self._sources:
                    # A late subscriber misses messages without noticing, so that the file is read as well.
                    if time.monotonic() - source.read_mono_s > 1.0:
                        with _reporting(source):
                            self._read_file(source)
            for source in self._sources:
                with _reporting(source):
                    self._read_file(source)
        finally:
            for source in self._sources:
                if source.socket is not None:
                    source.socket.close(0)
            context.term()

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, source: _RankSource
    ) -> None:
        """Connect to the address in a rank's endpoint file. If the file has changed, the rank was replaced,
        and the socket of its successor is connected instead. Without a usable endpoint the records come from
        the rank's file alone."""
        path = endpoint_path(self.folder, source.rank)
        try:
            with lines.open_file(path) as file:
                text = file.read()
        except FileNotFoundError:  # the rank has not begun; its records come from its file as well
            return
        if text == source.endpoint:
            return
        socket = context.socket(zmq.SUB)
        if source.socket is not None:
            poller.unregister(source.socket)
            source.socket.close(0)
        source.endpoint = text
        # The rank does not check who reads, but Curve needs a key pair on either side. Nobody gets records
        # without the rank's public key.
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
        """Receive one message of a rank's socket. If records before those in the message are missing, read
        the file, which has them."""
        assert source.socket is not None
        batch = source.socket.recv()
        source.heard_mono_s = time.monotonic()
        if batch != HEARTBEAT and not self._take(source, batch, is_file=False):
            self._read_file(source)

    def _read_file(self, source: _RankSource) -> None:
        """Read the records in a rank's file behind those already taken, and drop all but the newest WINDOW
        records from memory."""
        source.read_mono_s = time.monotonic()
        try:
            file = lines.open_file(source.path)
        except FileNotFoundError:  # the rank has not begun to write
            return
        num_reported = len(source.damaged_lines), len(source.torn_lines)
        with file:
            while True:
                file.seek(source.offset_bytes)
                batch = file.read(_READ_BYTES)
                # A line that is longer than a batch is read to its end, else the loop would stop before it. A
                # last line that the rank is still writing is left by `_take`.
                if b"\n" not in batch and len(batch) == _READ_BYTES:
                    batch += file.readline()
                begin_bytes = source.offset_bytes
                self._take(source, batch, is_file=True)
                # While the disk is full, records that came by the socket are not in the file yet, and must
                # stay in memory.
                if source.offset_bytes <= os.fstat(file.fileno()).st_size:
                    with self._lock:
                        while len(source.newest) > WINDOW:
                            source.newest.popleft()
                if source.offset_bytes == begin_bytes:
                    break
        if num_reported != (len(source.damaged_lines), len(source.torn_lines)):
            _log.warning("%s", "\n".join(_damage_sentences(source)))

    def _take(self, source: _RankSource, batch: bytes, is_file: bool) -> bool:
        """Add the records of a batch to those already taken, and update the state and the values of the rank.

        Args:
            source: the rank that the records come from.
            batch: lines; an incomplete last line is left for the next call.
            is_file: whether the batch was read from the file, from `offset_bytes` on. All lines of the file
                are taken, whatever their `seq` says. Of the lines from a socket, those taken before are
                skipped, and those behind a missing record are not taken.

        Returns:
            Whether all records were taken or had been taken before. If not, one before them is missing, and
            the caller has to read the file.
        """
        taken: list[Record] = []
        places_bytes: list[int] = []
        damaged_lines: list[int] = []
        torn_lines: list[int] = []
        num_taken, offset_bytes, shift = source.num_taken, source.offset_bytes, source.shift
        is_complete = True
        for line in lines.whole(batch):
            record = parse_or_mark(source.rank, line, num_taken)
            is_damage = isinstance(record, Event) and record.kind == DAMAGE
            expected_seq = num_taken + shift
            if is_file and is_damage:
                damaged_lines.append(num_taken + 1)
            elif is_file and record.seq != expected_seq:
                shift = record.seq - num_taken
                torn_lines.append(num_taken + 1)
            elif not is_file and (is_damage or record.seq > expected_seq):
                is_complete = False
                break
            elif not is_file and record.seq < expected_seq:
                continue
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
                source.step = max(source.step, record.step)
                if isinstance(record, Sample):
                    source.values.update(record.values)
                elif record.kind == "state":
                    source.state = cast(RunState, record.text)
                    source.progress = _new_progress(record, source.progress)
                    if record.text not in STATES_OF_NO_STEP:
                        # A run with sharded weights (FSDP) that loses a rank goes back to its newest
                        # checkpoint.
                        source.step = record.step
                    else:
                        # Another process has taken the rank's place; the values are of the earlier one.
                        source.values.clear()
        return is_complete
