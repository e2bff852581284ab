"""A watchdog that ends collectives, of gloo and of NCCL, that take longer than their timeout.

gloo has a timeout of its own, whose error names neither the collective nor the ranks that are missing. NCCL's
would end the process, and is switched off (diagnosis.py). So a thread of each rank checks once a second
whether torch's flight recorder has a collective that does not end. A rank that waits writes this into the
store in which the ranks meet. After the timeout the thread cuts this rank off from the group, as after
another rank's failure, and the collective raises an error that names the ranks that have not begun it.

The flight recorder has no sends and receives of gloo. For these, and in versions of torch in which it has
nothing of gloo, gloo's own timeout counts.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from nbgpu.engine.frames import is_library
from nbgpu.engine.group import torch_private
from nbgpu.engine.group.torch_private import CollectiveInFlight
from nbgpu.text.ranks import named_ranks

_log = logging.getLogger("nbgpu.engine")

_LOOK_PERIOD_S = 1.0
_ANNOUNCE_AFTER_S = 5.0
"""After this wait, or earlier if the timeout is short, a rank writes into the store in which collective it
waits."""
_STORE_PATIENCE_S = 2.0
"""How long the store may take to answer which ranks have begun a collective."""
_RAISE_AFTER_S = 0.2
_NUM_RAISES = 10
_GLOO_MARGIN_S = 5.0
_GLOO_MARGIN_SHARE = 0.1
"""How much longer gloo itself waits than the watchdog."""


class CollectiveTimeoutError(dist.DistBackendError):
    """A collective took longer than `collective_timeout_s` allows."""


_timeouts_s: dict[str, float] = {}
"""How long a collective may take in each group, by the group's name."""
_watchdog: Watchdog | None = None
"""The watchdog of the group's present generation; None before the first, and once the rank was cut off."""
_message = ""
"""The error message about the collective of this generation that took too long; empty if none did."""
_is_due = False
"""Whether the main thread still has to raise an error with `_message`."""


def gloo_timeout(timeout_s: float) -> timedelta:
    """Return the timeout for gloo itself, longer than the watchdog's `timeout_s` (seconds), so that the
    watchdog raises first: gloo's error would name neither the collective nor the missing ranks."""
    if torch_private.records_gloo():
        timeout_s += _GLOO_MARGIN_S + _GLOO_MARGIN_SHARE * timeout_s
    return timedelta(seconds=timeout_s)


def allow(group_name: str, timeout_s: float) -> None:
    """Set the time that a collective of a group may take."""
    _timeouts_s[group_name] = timeout_s


def begin(watchdog: Watchdog) -> None:
    """Watch the collectives of a new generation of the group, in place of those of the one before."""
    global _watchdog, _message, _is_due
    is_first = not _timeouts_s
    _timeouts_s.clear()
    allow(torch_private.group_name(dist.group.WORLD), watchdog.timeout_s)
    _message, _is_due = "", False
    _watchdog = watchdog
    if is_first:
        threading.Thread(target=_watch, name="nbgpu-collective-timeout", daemon=True).start()


def end() -> None:
    """Stop watching: the rank is cut off from its groups."""
    global _watchdog
    _watchdog = None


def explain(error: BaseException) -> BaseException:
    """Return a CollectiveTimeoutError for an error that torch raised because the watchdog had cut the group's
    connections. Any other error is returned unchanged."""
    global _is_due
    if not _message or not isinstance(error, RuntimeError) or isinstance(error, CollectiveTimeoutError):
        return error
    if not _is_from_torch(error):
        return error
    _is_due = False
    return CollectiveTimeoutError(_message).with_traceback(error.__traceback__)


def take_error() -> CollectiveTimeoutError | None:
    """Return the error about the late collective if the main thread still has to raise it, and return it only
    once."""
    global _is_due
    is_due, _is_due = _is_due, False
    return CollectiveTimeoutError(_message) if is_due else None


def _is_from_torch(error: RuntimeError) -> bool:
    """Return whether a communication backend raised an error, and not the person's own code."""
    # gloo raises a plain RuntimeError, whose text has 'gloo' in a path, or 'Connection' or 'connection'.
    if isinstance(error, dist.DistBackendError) or "gloo" in str(error) or "onnection" in str(error):
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and is_library(innermost.tb_frame.f_code.co_filename)


def _watch() -> None:
    """Have the present watchdog check the collectives in flight once a period, for as long as the process
    lives."""
    checked_s = time.monotonic()
    while True:
        watchdog = _watchdog
        period_s = _LOOK_PERIOD_S if watchdog is None else watchdog.period_s
        time.sleep(period_s)
        # A much longer sleep than that: the process was stopped, and has not waited for any rank meanwhile.
        stopped_s = time.monotonic() - checked_s - 3 * period_s
        checked_s = time.monotonic()
        if watchdog is not None and watchdog is _watchdog:
            try:
                watchdog.look(checked_s, max(0.0, stopped_s))
            except Exception:  # noqa: BLE001 - it is logged
                # Without this thread no collective over NCCL would ever be given up.
                _log.exception("the collectives in flight could not be looked at")


@dataclass
class _Wait:
    """The state of a wait in one process group, in which a collective has begun and not ended."""

    ended: str
    """The number of the collective that ended last."""
    since_s: float
    examine_after_s: float
    """The length of the wait after which the collective itself is examined, which takes some ms."""
    is_announced: bool = False
    """Whether this rank has written into the store that it waits."""


class Watchdog:
    """Watches the collectives of one generation of the group, which this rank has just formed.

    Args:
        timeout_s: how long a collective of the default group may take.
        rank: this rank's number.
        store: the store in which the ranks of this generation meet.
        give_up: a function that calls its argument and then cuts this rank off from the group; it does
            neither if the rank is cut off already.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        store: dist.Store,  # type: ignore[name-defined]
        give_up: Callable[[Callable[[], None]], None],
    ) -> None:
        self.period_s = min(_LOOK_PERIOD_S, timeout_s / 8)
        self._announce_after_s = min(_ANNOUNCE_AFTER_S, timeout_s / 4)
        self.timeout_s = timeout_s
        self._rank = rank
        self._store = store
        self._give_up = give_up
        # The recorder keeps the groups of earlier generations.
        self._earlier = set(torch_private.unfinished_groups())
        self._waits: dict[str, _Wait] = {}

    def look(self, now_s: float, stopped_s: float) -> None:
        """Check the collectives in flight, and cut this rank off from the group if one has taken longer than
        its timeout.

        Args:
            now_s: the monotonic time now.
            stopped_s: how long the process was stopped since the last check, which does not count as a wait.
        """
        # The wait of a group begins anew with each of its collectives that ends.
        waits = {}
        for group, ended in torch_private.unfinished_groups().items():
            if group not in self._earlier:
                wait = self._waits.get(group)
                if wait is None or wait.ended != ended:
                    wait = _Wait(ended, now_s, self._announce_after_s)
                wait.since_s += stopped_s
                waits[group] = wait
        self._waits = waits
        # To read the collectives in flight takes time, so it is done for long waits only.
        long = {group for group, wait in waits.items() if now_s - wait.since_s >= wait.examine_after_s}
        if not long:
            return
        in_flight = torch_private.collectives_in_flight()
        for group in long:
            self._examine(waits[group], in_flight.get(group), now_s)

    def _examine(self, wait: _Wait, collective: CollectiveInFlight | None, now_s: float) -> None:
        """Write into the store that this rank waits in a collective, and end the wait after the timeout.

        Args:
            wait: the state of the group's wait.
            collective: the oldest collective in flight of this group; None if torch has no record of one.
            now_s: the monotonic time now.
        """
        if collective is None or not torch_private.group_ranks(collective.group):
            # torch has no record of the collective, or the person has ended its group.
            wait.examine_after_s = float("inf")
            return
        # A group that was split from another one is not in the table.
        timeout_s = _timeouts_s.get(collective.group, self.timeout_s)
        wait.examine_after_s = timeout_s
        if not wait.is_announced:
            wait.is_announced = True
            # On a thread of its own, because the store may not answer for a long time.
            threading.Thread(target=self._announce, args=(collective,), daemon=True).start()
        if now_s - wait.since_s >= timeout_s:
            self._end_wait(collective, timeout_s)

    def _announce(self, collective: CollectiveInFlight) -> None:
        """Write into the store that this rank waits in a collective; if the store is given up, the other
        ranks do not learn of the wait."""
        try:
            self._store.set(_key(collective, self._rank), str(collective.number))
        except (dist.DistStoreError, ValueError) as error:
            _log.debug("the other ranks do not hear that this one waits: %s", error)

    def _end_wait(self, collective: CollectiveInFlight, timeout_s: float) -> None:
        """Cut this rank off from the group, and have the main thread raise an error that names the ranks that
        have not begun the collective."""
        message = (
            f"{collective.describe()}, was given up after {timeout_s:g} s (collective_timeout_s): "
            f"{self._describe_missing_ranks(collective)}. Variables are kept, and the process group is formed again"
        )

        def note() -> None:
            global _message, _is_due
            _message, _is_due = message, True

        # Noted before the cut: the main thread may raise torch's error at once, and `explain` then needs the
        # message.
        self._give_up(note)
        if collective.backend != "gloo":
            # gloo's wait for a connection that is cut raises by itself. A kernel that NCCL has aborted
            # merely ends.
            _raise_on_main_thread()

    def _describe_missing_ranks(self, collective: CollectiveInFlight) -> str:
        """Return a text about the ranks that have not begun a collective, from what the waiting ranks have
        written into the store."""
        ranks = torch_private.group_ranks(collective.group)
        arrived: list[int] = []

        def read_store() -> None:
            """Read from the store which ranks wait in this collective, or in a later one."""
            try:
                for rank in ranks:
                    key = _key(collective, rank)
                    if rank == self._rank or (
                        self._store.check([key]) and int(self._store.get(key)) >= collective.number
                    ):
                        arrived.append(rank)
            except (dist.DistStoreError, ValueError) as error:
                _log.debug("the ranks that wait are not known: %s", error)
                return
            answered.set()

        answered = threading.Event()
        # The server of the store may be gone, or stand still.
        threading.Thread(target=read_store, daemon=True).start()
        if not answered.wait(_STORE_PATIENCE_S):
            return "who had not come is not known"
        missing = [rank for rank in ranks if rank not in arrived]
        if not missing:
            return "all ranks had come, and the transfer did not end"
        return f"{named_ranks(missing)} had not come"


def _key(collective: CollectiveInFlight, rank: int) -> str:
    """Return the store's key under which a rank writes in which collective of a group it waits."""
    return f"nbgpu/waits/{collective.group}/{collective.is_p2p:d}/{rank}"


def _raise_on_main_thread() -> None:
    """Interrupt the main thread, so that it raises the watchdog's error in the person's code
    (`ipykernel/interrupts.py`).

    A SIGINT that arrives outside of the person's code has no effect, so it is sent again until the error is
    raised.
    """
    for _ in range(_NUM_RAISES):
        time.sleep(_RAISE_AFTER_S)
        if not _is_due:
            return
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)
