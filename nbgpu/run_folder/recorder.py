"""Writes the samples and events of one rank, to its file and to a socket.

The rank appends JSON lines to `rankN.jsonl` in the run's folder and publishes the same bytes on a ZMQ socket.
The socket delivers them at once. The file has all of them: records are numbered, and a reader that misses
some on the socket (it subscribed late, a queue was full, its kernel was restarted) reads these from the file.
The socket listens on loopback only and encrypts with Curve. Its public key, without which nobody can read
from it, is in `rankN.endpoint.json` in the run's folder, which only the user can enter.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from nbgpu.machine import clock
from nbgpu.machine.files import write_whole
from nbgpu.protocol.records import RunState
from nbgpu.run_folder.rank_files import HEARTBEAT, HEARTBEAT_PERIOD_S, endpoint_path, record_path

_log = logging.getLogger("nbgpu.telemetry")

FLUSH_PERIOD_S = 0.05
PROBE_PERIOD_S = 1.0


def _make_whole(path: Path) -> int:
    """Cut off an incomplete last line of a file of records, and return the number of the other lines.

    A rank that replaces a killed one goes on with its file, whose last line may be half written.
    """
    if not path.exists():
        return 0
    records = path.read_bytes()
    end = records.rfind(b"\n") + 1
    if end < len(records):
        os.truncate(path, end)
    return records.count(b"\n")


class Recorder:
    """Writes one rank's samples and events, on a thread of its own.

    The main thread only appends to a list, so that telemetry does not slow the steps, and the recorder's
    thread goes on sending while the main thread waits in a collective.

    Args:
        folder: the run's folder, which exists.
        rank: the rank.
        probe: called about once a second on the recorder's thread, from the first record or `at` on; returns
            values by series, such as memory and utilization. If it raises, the exception is recorded as a
            'note' event, and it is not called again.
    """

    def __init__(
        self, folder: Path, rank: int, probe: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        """Open the file and a socket on a free port of loopback, write the endpoint file, and start the
        thread."""
        self._rank = rank
        self._probe = probe
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._num_taken = _make_whole(record_path(folder, rank))
        """The number of records taken out of `_waiting`, and in the file before. There is no counter of all
        records: an interrupt between counting a record and appending it would leave a gap in the numbers,
        which readers take for a lost line."""
        self._step: int | None = None
        """The step of the probe's samples; None, without which the probe is not called, until it is known: a
        rank that replaces another, or resumes from a checkpoint, does not begin at step 0."""
        self._unwritten = bytearray()
        self._full_disk_reported = False
        self._closing = threading.Event()
        self._file = record_path(folder, rank).open("ab", buffering=0)
        # Not the engine's ZMQ context, because ipyparallel closes that one.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        public_key, secret_key = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey = public_key
        self._socket.curve_secretkey = secret_key
        self._socket.linger = 1000
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        endpoint = {"address": f"tcp://127.0.0.1:{port}", "public_key": public_key.decode()}
        path = endpoint_path(folder, rank)
        try:
            write_whole(path, json.dumps(endpoint), mode=0o600)
        except OSError as error:
            # Without the endpoint, readers take the records from the file, up to a second later.
            self.event("note", f"{path} cannot be written, so that curves come late: {error.strerror}")
        self._thread = threading.Thread(
            target=self._send_until_closed, name=f"nbgpu-recorder-{rank}", daemon=True
        )
        self._thread.start()

    def at(self, step: int) -> None:
        """Set the number of optimizer steps that are done, which the probe's next samples get."""
        with self._lock:
            self._step = step

    def sample(self, step: int, *, time_s: float | None = None, **values: float) -> None:
        """Record values that were measured when `step` optimizer steps were done.

        Args:
            step: the number of optimizer steps.
            time_s: the time of the measurement in seconds since the epoch; None for now.
            values: the values by series.
        """
        self._append(step, {"values": values}, time_s)

    def event(self, kind: str, text: str, step: int | None = None, /, **detail: Any) -> None:
        """Record an event; `detail` must be JSON."""
        self._append(step, {"kind": kind, "text": text, "detail": detail})

    def state(self, state: RunState, step: int | None = None, **detail: Any) -> None:
        """Record the rank's state: loading, training, paused and so on."""
        self.event("state", state, step, **detail)

    def close(self) -> None:
        """Send the records that are waiting, then close file, socket and thread."""
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._context.term()
        self._file.close()

    def _append(self, step: int | None, fields: dict[str, Any], time_s: float | None = None) -> None:
        """Give a record its number, time and step, and append it as a line of JSON to the list that the
        thread writes and sends.

        Args:
            step: the step of the record; None for the newest one.
            fields: the other fields of the record.
            time_s: seconds since the epoch; None for now.
        """
        time_s = clock.notebooks_time_s() if time_s is None else time_s
        with self._lock:
            if step is None:
                step = self._step or 0
            else:
                # The record of a checkpoint comes when it is written, perhaps some steps later, and must not
                # set the step back.
                self._step = step if self._step is None else max(self._step, step)
            seq = self._num_taken + len(self._waiting)
            line = json.dumps({"seq": seq, "time_s": time_s, "step": step, **fields})
            self._waiting.append(line.encode() + b"\n")

    def _send_until_closed(self) -> None:
        """Write and publish waiting records every FLUSH_PERIOD_S, take the probe's samples, and send a
        heartbeat when there is nothing else. Runs on the recorder's thread."""
        last_probe_s = last_sent_s = 0.0
        while True:
            closing = self._closing.wait(FLUSH_PERIOD_S)
            now_s = time.monotonic()
            if self._probe is not None and self._step is not None and now_s - last_probe_s >= PROBE_PERIOD_S:
                last_probe_s = now_s
                self._append_probe()
            with self._lock:
                waiting, self._waiting = self._waiting, []
                self._num_taken += len(waiting)
            if waiting:
                batch = b"".join(waiting)
                self._unwritten += batch
            if self._unwritten:
                self._write()
            if waiting:
                self._socket.send(batch)
                last_sent_s = now_s
            elif now_s - last_sent_s >= HEARTBEAT_PERIOD_S:
                self._socket.send(HEARTBEAT)
                last_sent_s = now_s
            if closing:
                self._write()
                if self._unwritten:
                    _log.error(
                        "%s lacks its last %d bytes: the disk is full", self._file.name, len(self._unwritten)
                    )
                return

    def _write(self) -> None:
        """Append the unwritten bytes to the file. Those that do not fit on the disk stay in memory for the
        next call."""
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._full_disk_reported:
                self._full_disk_reported = True
                text = f"{self._file.name} cannot be written now, and is kept in memory: {error.strerror}"
                _log.warning(text)
                self.event("note", text)

    def _append_probe(self) -> None:
        """Record the probe's values. A probe that raises is not called again."""
        assert self._probe is not None
        try:
            values = self._probe()
        except Exception as error:  # noqa: BLE001 - a driver may raise anything, and training must go on
            self._probe = None
            self.event("note", f"memory and utilization are no longer measured: {error!r}")
        else:
            self._append(None, {"values": dict(values)})
