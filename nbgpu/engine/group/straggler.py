"""Makes this rank slower than the others, as a rank with a slower processor is.

The rank's own work is the time outside of collectives, from the beginning of a cell or call on. Before each
collective, and after the forward pass and the optimizer in a step of a run, the rank sleeps as long as the
slower processor would still have worked. The wait within a collective is not made longer. Neither is the work
before one of nbgpu's own collectives: a run loads its packages and data there.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

_SLICE_S = 0.05
"""A longer sleep is cut into parts, so that a rank that is freed wakes up."""

_factor = 1.0
_since_s = 0.0
"""The monotonic time of the last `catch_up` or `begin`: the work since then is still to be made longer."""
_waited_s = 0.0
"""The time since `_since_s` in which this rank waited for others."""
_is_freed = threading.Event()


def install(factor: float) -> None:
    """Make this rank's work `factor` times as long from now on."""
    global _factor
    _factor = factor
    begin()


def begin() -> None:
    """Count this rank's work from now on, such as at the beginning of a cell."""
    global _since_s, _waited_s
    if _factor != 1:
        _since_s, _waited_s = time.monotonic(), 0.0


def free(is_freed: bool) -> None:
    """End the sleep that goes on, and allow no other one until a call with False. Call on any thread."""
    if is_freed:
        _is_freed.set()
    else:
        _is_freed.clear()


def catch_up() -> None:
    """Sleep as long as a slower processor would still work on what this rank has done since the last call. On
    other threads than the main one the call returns at once."""
    global _since_s, _waited_s
    if _factor == 1 or threading.current_thread() is not threading.main_thread():
        return
    now_s = time.monotonic()
    until_s = now_s + (_factor - 1) * max(0.0, now_s - _since_s - _waited_s)
    while (left_s := until_s - time.monotonic()) > 0 and not _is_freed.is_set():
        time.sleep(min(left_s, _SLICE_S))
    _since_s, _waited_s = time.monotonic(), 0.0


def exclude_wait(begun_s: float) -> None:
    """Leave the time since `begun_s` (`time.monotonic`) out of this rank's work."""
    global _waited_s
    if _factor != 1:
        _waited_s += time.monotonic() - max(begun_s, _since_s)


def exclude_time_until_done(sent: torch.futures.Future[Any]) -> None:
    """Leave the time from now until a future is done out of this rank's work.

    DDP waits in C++ for the last bucket's future, right after the gradients are computed.
    """
    if _factor != 1:
        begun_s = time.monotonic()
        sent.add_done_callback(lambda _: exclude_wait(begun_s))
