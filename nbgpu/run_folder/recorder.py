"""Writes the samples and events of one rank, to its file and to a socket.

The rank appends JSON lines to `rankN.jsonl` in the run's folder and publishes the very same bytes on a ZMQ
socket. The file is the record, the socket is the speed: records are counted, and whatever the socket lost
(a late subscriber, a full queue, a restarted kernel) is read from the file, so that the reader's history has
no gap and no repetition. The socket listens on loopback only and speaks Curve; its public key, without which
nobody gets a byte, stands in `rankN.endpoint.json` in the run's folder, which only the user can enter.
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
    """Cut off an incomplete last line of a file of records, and return the number of its lines.

    A rank that takes the place of a killed one goes on with the file, whose last line may be half written.
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

    The main thread only appends to a list, so that telemetry costs a step nothing that can be noticed, and
    the thread keeps sending while the main thread waits in a collective.

    Args:
        folder: the run's folder, which exists.
        rank: whose records these are.
        probe: called about once a second on the recorder's thread, from the first record or `at` on; returns
            series such as memory and utilization. An exception in it ends up as a 'note' event once, and
            stops the probing.
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
        """The number of records before those that wait. No other count goes up with each record, because an
        interrupt between that and the append would leave a gap, which looks like a line that was taken
        out."""
        self._step: int | None = None
        """The step of the probe's samples. A rank that takes another's place, or goes on from a checkpoint,
        does not begin at step 0, and nothing is measured before its step is known."""
        self._unwritten = bytearray()
        self._full_disk_reported = False
        self._closing = threading.Event()
        self._file = record_path(folder, rank).open("ab", buffering=0)
        # A context of its own, because the engine's context belongs to ipyparallel, which closes it.
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
            # Readers then take the records from the file, up to a second later.
            self.event("note", f"{path} cannot be written, so that curves come late: {error.strerror}")
        self._thread = threading.Thread(
            target=self._send_until_closed, name=f"nbgpu-recorder-{rank}", daemon=True
        )
        self._thread.start()

    def at(self, step: int) -> None:
        """Set the number of optimizer steps that are done, to which the probe's next samples belong."""
        with self._lock:
            self._step = step

    def sample(self, step: int, *, time_s: float | None = None, **values: float) -> None:
        """Record values that were measured when `step` optimizer steps were done.

        Args:
            step: optimizer steps.
            time_s: when they were measured, where that was not now; seconds since the epoch.
            values: by series.
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
        """Number a record, make it a line of JSON, and append it to the list that the thread empties.

        Args:
            step: the step of the record; None for the newest known one.
            fields: the fields of the record.
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
                self._report_lost_records()
                return

    def _write(self) -> None:
        """Append to the file what fits on the disk. The rest is kept, and tried again the next time."""
        try:
            del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._full_disk_reported:
                self._full_disk_reported = True
                text = f"{self._file.name} cannot be written now, and is kept in memory: {error.strerror}"
                _log.warning(text)
                self.event("note", text)

    def _report_lost_records(self) -> None:
        self._write()
        if self._unwritten:
            _log.error("%s lacks its last %d bytes: the disk is full", self._file.name, len(self._unwritten))

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
