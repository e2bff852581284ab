"""Collectives whose results are held back until a slower link would have delivered them.

The real collective runs at once. A thread for each process group waits for it, works out when the link would
be done, and delivers the result then. Meanwhile the main thread computes, or waits without the GIL.

The link begins with a collective when the last rank has begun it and the link is free. All ranks are on one
host and share its clock, and each writes into a file in shared memory when it begins a collective. From this
file all ranks work out the same times.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbgpu.engine.group import straggler

_NUM_SLOTS = 1024
"""How many collectives a rank may be ahead of another whose arrivals it reads."""
_SLOT = struct.Struct("qd")
"""The number of a collective, and the monotonic time in seconds at which a rank began it."""
_LOOK_PERIOD_S = 0.0005
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
"""How late a sleep may end. The kernel's default of 50 us is as much as the latency of a link."""


class Arrivals:
    """The times at which each rank of a group began its collectives, in a file in shared memory.

    Each rank has a ring of `_NUM_SLOTS` entries, and writes only its own.

    Args:
        path: the group's file, in a folder that only the user can enter.
        rank: this rank's number in the group.
        world_size: the number of ranks in the group.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        num_bytes = world_size * _NUM_SLOTS * _SLOT.size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Every rank sets the same size, which changes nothing in a file that has it.
            os.ftruncate(descriptor, num_bytes)
            self._memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def note(self, number: int, time_s: float) -> None:
        """Write the monotonic time at which this rank began its collective with this number, counted from
        1."""
        _SLOT.pack_into(self._memory, self._offset(self._rank, number), number, time_s)

    def last_s(self, number: int) -> float:
        """Return the monotonic time at which the last rank began this collective, among those that have begun
        it. Call when the real collective has ended: what it needed from other ranks has then arrived."""
        slots = (
            _SLOT.unpack_from(self._memory, self._offset(rank, number)) for rank in range(self._world_size)
        )
        times_s: list[float] = [time_s for number_in_slot, time_s in slots if number_in_slot == number]
        # A rank that is `_NUM_SLOTS` collectives ahead has overwritten its slot, and is not waited for.
        return max(times_s, default=0.0)

    def _offset(self, rank: int, number: int) -> int:
        return (rank * _NUM_SLOTS + number % _NUM_SLOTS) * _SLOT.size


class Line:
    """The link of this rank, which all groups of a generation share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = {"out": 0.0, "in": 0.0}
        self.given_up = threading.Event()
        """Set once the group was given up: the results that are held back then become errors."""

    def reserve(self, begun_s: float, lasts_s: float, *directions: str) -> float:
        """Reserve the link for a message from the moment when it is free; return the time at which the
        message has arrived.

        Args:
            begun_s: the earliest time for the message to begin.
            lasts_s: how long the message occupies the link.
            directions: the directions that the message takes, 'out' and 'in'.
        """
        with self._lock:
            through_s = max(begun_s, *(self._free_s[name] for name in directions)) + lasts_s
            self._free_s.update(dict.fromkeys(directions, through_s))
        return through_s


class HeldWork(dist.Work):
    """The Work object of a collective whose result is held back: it completes when the slower link would have
    completed the collective.

    Args:
        real: the real collective; None if it has ended.
        arrivals: when the ranks began their collectives; None if that is not known.
        number: the number of this collective among those arrivals.
        lasts_s: how long the link is busy with it.
        line: the rank's link.
    """

    def __init__(
        self, real: dist.Work | None, arrivals: Arrivals | None, number: int, lasts_s: float, line: Line
    ) -> None:
        super().__init__()
        self._real = real
        self._arrivals = arrivals
        self._number = number
        self._lasts_s = lasts_s
        self._line = line
        self.done: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result, without the GIL; raise what the real collective raised."""
        begun_s = time.monotonic()
        try:
            if timeout:
                self._wait_at_most(timeout)
            self.done.wait()
        finally:
            if threading.current_thread() is threading.main_thread():
                straggler.exclude_wait(begun_s)
        return True

    def _wait_at_most(self, timeout: timedelta) -> None:
        """Wait until the result is there, or raise after the timeout."""
        # Polled, because an interrupt could leave a lock of Python's taken.
        until_s = time.monotonic() + timeout.total_seconds()
        while not self.done.done():
            if time.monotonic() > until_s:
                raise dist.DistBackendError(f"a collective timed out after {timeout.total_seconds():g} s")
            time.sleep(_LOOK_PERIOD_S)

    def is_completed(self) -> bool:
        return self.done.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the error of the collective; None if it has ended well or not at all."""
        if self.is_completed():
            try:
                self.done.value()
            except Exception as error:  # noqa: BLE001 - whatever the collective raised
                return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self.done.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._real is not None:
            self._real.get_future()  # raises where the backend has none for this collective
        return self.done

    def deliver(self, *directions: str) -> None:
        """Wait for the real collective and for the link in these directions ('out', 'in'), then set the
        result or the error. Call on another thread than the one that waits for the result."""
        try:
            value = None if self._real is None else _result(self._real)
            begun_s = time.monotonic() if self._arrivals is None else self._arrivals.last_s(self._number)
            through_s = self._line.reserve(begun_s, self._lasts_s, *directions)
            if self._line.given_up.wait(max(0.0, through_s - time.monotonic())):
                raise dist.DistBackendError(
                    "the process group was given up while a simulated link held a result back, because another rank failed"
                )
        except Exception as error:  # noqa: BLE001 - the rank that waits gets it
            self.done.set_exception(error)
        else:
            self.done.set_result(value)


def _result(real: dist.Work) -> Any:
    """Wait for a real collective; return its result, or None where the backend gives no future."""
    try:
        future = real.get_future()
    except (RuntimeError, NotImplementedError):
        real.wait()
        return None
    return future.wait()


class SequenceCounter:
    """Numbers the collectives of a group, or the messages from one rank to another, in the order in which
    this rank begins them, which is the same on all of these ranks.

    Args:
        arrivals: when the ranks began each of them.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self._lock = threading.Lock()
        self._number = 0

    def arrive(self) -> int:
        """Note that this rank begins the next collective; return the collective's number. Call before the
        real one begins."""
        with self._lock:
            self._number += 1
            self.arrivals.note(self._number, time.monotonic())
            return self._number


class Queue(SequenceCounter):
    """The collectives of one process group, delivered in order by a thread."""

    def __init__(self, line: Line, arrivals: Arrivals) -> None:
        super().__init__(arrivals)
        self._line = line
        self._held: queue.SimpleQueue[HeldWork | None] = queue.SimpleQueue()
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._deliver_all, name="nbgpu-link", daemon=True)
        self._thread.start()

    def arrive(self) -> int:
        """As in SequenceCounter; a call on the thread that delivers starts another one in its place."""
        if threading.current_thread() is self._thread:
            # A callback of a result runs on this thread. It may wait for a collective that it begins, as
            # PowerSGD's does, so another thread has to deliver that one.
            self._start()
        return super().arrive()

    def put(self, real: dist.Work | None, number: int, lasts_s: float) -> HeldWork:
        """Hold a collective back.

        Args:
            real: the real collective; None if it has ended.
            number: its number, from `arrive`.
            lasts_s: how long it occupies the link.
        """
        held = HeldWork(real, self.arrivals, number, lasts_s, self._line)
        self._held.put(held)
        return held

    def close(self) -> None:
        """End the thread when all that is held back is delivered or given up."""
        self._held.put(None)

    def _deliver_all(self) -> None:
        """Deliver the collectives in the order in which they began, on a thread, until `close`, or until
        another thread takes the place of this one (`arrive`)."""
        _wake_up_in_time()
        while threading.current_thread() is self._thread:
            held = self._held.get()
            if held is None:
                return
            held.deliver("out", "in")


def hold_message(
    real: dist.Work, line: Line, arrivals: Arrivals | None, number: int, lasts_s: float, direction: str
) -> HeldWork:
    """Hold back a message to or from one other rank.

    Each message has a thread of its own, because a program may need its messages in another order than it
    began them.

    Args:
        real: torch's Work of the real message.
        line: the rank's link.
        arrivals: when sender and receiver began each of their messages; None where the sender is not known.
        number: this message's number in `arrivals`; not used where that is None.
        lasts_s: how long it occupies the link.
        direction: 'out' for a message that is sent, 'in' for one that is received.

    Returns:
        A Work that completes when the simulated link would have delivered the message.
    """
    held = HeldWork(real, arrivals, number, lasts_s, line)

    def deliver() -> None:
        _wake_up_in_time()
        held.deliver(direction)

    threading.Thread(target=deliver, name="nbgpu-link-message", daemon=True).start()
    return held


def _wake_up_in_time() -> None:
    """Let this thread's sleeps end within microseconds (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
