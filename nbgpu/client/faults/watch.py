"""Watches ranks until all are back: once one has failed or is gone, the others are freed from waiting for it.

A rank that waits in a collective for a rank that raised would wait until the collective times out, after half
an hour. The watch cuts the connections of its process groups, which frees it at once, and interrupts a rank
that computes a moment later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import LeftResult, failures
from nbgpu.client.faults import mismatches
from nbgpu.machine.processes import CoreUse
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import RankFailure

_INTERRUPT_AFTER_S = 0.4
"""The time from freeing the ranks until they are interrupted, and between two interrupts."""
_GIVE_UP_AFTER_S = 1.7
"""A rank that is not back this long after it was freed is stuck, without the time it waited for a core."""
_GIVE_UP_AFTER_CPU_S = 1.5
"""A rank that has had this much time on a core since it was freed is stuck, too."""
_GIVE_UP_AT_LAST_S = 15.0
"""After this time a rank is stuck even if it has had no core."""
_DEATH_PATIENCE_S = 0.1
"""The end of a process may become known this much later than the network errors of its peers."""
_NETWORK_ERRORS = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "KeyboardInterrupt",
)
"""The errors of a rank that was freed or interrupted, or whose peer went away."""

_TIMEOUT_ERROR = "CollectiveTimeoutError"
"""The error of a rank that has left a collective because it took too long, which ends the collective on the
other ranks (engine/group/collective_timeout.py)."""
_PEER_ERROR = "PeerFailed"
"""The error of a rank of a training run that has learned of another rank's failure
(engine/group/consensus.py)."""


class RankWatch:
    """Watches the ranks that were sent a cell or a call until all are back.

    Args:
        ranks: the ranks, which can be freed.
        results: the pending replies to a cell or a call, by rank.
    """

    def __init__(self, ranks: Ranks, results: Mapping[int, Reply]) -> None:
        self._ranks = ranks
        self._results = results
        self._gone: dict[int, str] = {}
        """How the processes that have ended did so, by rank."""
        self._failed_first: set[int] = set()
        """Ranks that failed before any rank was freed: the causes."""
        self._freed: set[int] = set()
        self._back_before = {
            rank for rank, result in results.items() if isinstance(result, LeftResult) and result.ready()
        }
        """Ranks of a rejoined run that were back before: the run's previous owner may have freed them."""
        self._freed_mono_s: float | None = None
        self._interrupted_mono_s = 0.0
        self._use_when_freed: dict[int, CoreUse] = {}
        self._has_reply = threading.Event()
        for result in results.values():
            result.add_done_callback(lambda _: self._has_reply.set())

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank comes back, at most `timeout_s`."""
        self._has_reply.wait(timeout_s)
        self._has_reply.clear()

    def pending(self) -> list[int]:
        """Return the ranks that still work: those that are neither back nor gone."""
        return [
            rank for rank, result in self._results.items() if not result.ready() and rank not in self._gone
        ]

    @property
    def gone(self) -> list[int]:
        """The ranks whose processes have ended."""
        return sorted(self._gone)

    def stuck(self) -> list[int]:
        """Return the ranks that did not come back although they were freed and interrupted.

        The list is empty while one of them may merely be slow, so that all are named at once.
        """
        if self._freed_mono_s is None:
            return []
        since_s = time.monotonic() - self._freed_mono_s
        if since_s < _GIVE_UP_AFTER_S:
            return []
        pending = self.pending()
        if since_s <= _GIVE_UP_AT_LAST_S:
            uses = self._ranks.core_uses(pending)
            if not all(self._had_enough_time(rank, uses.get(rank), since_s) for rank in pending):
                return []
        return pending

    def _had_enough_time(self, rank: int, use: CoreUse | None, since_s: float) -> bool:
        """Return whether a rank has had enough time to come back, even on a host where many threads share few
        cores.

        Args:
            rank: the rank.
            use: how long its process has had and waited for cores; None if that is not known.
            since_s: the time since the rank was freed.
        """
        before = self._use_when_freed.get(rank)
        if self._ranks.is_ending(rank) or use is None or before is None:
            return False
        waited_s = use.waited_s - before.waited_s
        return use.had_s - before.had_s > _GIVE_UP_AFTER_CPU_S or since_s - waited_s > _GIVE_UP_AFTER_S

    def check(self) -> None:
        """Find the ranks that have failed or are gone, and free the others; interrupt those that stay pending
        after that. Call it repeatedly.

        Raises:
            ClusterError: no rank can be reached any more.
        """
        if self.pending():
            self._ranks.require_reachable()
        failed = {failure.rank for failure in self._raised()}
        for rank in {*self.pending(), *failed}:
            ended = self._ranks.how_ended(rank)
            if ended is not None:
                self._gone[rank] = ended
        if self._freed_mono_s is None:
            self._failed_first = failed - set(self._gone)
            if (self._failed_first or self._gone) and self.pending():
                self.free()
        elif time.monotonic() - max(self._freed_mono_s, self._interrupted_mono_s) > _INTERRUPT_AFTER_S:
            self._interrupt()

    def free(self) -> None:
        """Free the ranks that still work from whatever collective they wait in."""
        pending = self.pending()
        self._freed |= set(pending)
        self._freed_mono_s = time.monotonic()
        self._ranks.sever()
        # For ranks on another host this takes a message and its reply, so the ranks are freed first.
        self._use_when_freed = self._ranks.core_uses(pending)

    @uninterrupted()
    def stop(self) -> None:
        """Interrupt and free the ranks that still work, as the stop button does, and wait until they are back
        or stuck."""
        self._interrupt()
        self.free()
        while self.pending() and not self.stuck():
            time.sleep(0.01)
            self.check()
            take_interrupt()

    def _interrupt(self) -> None:
        """Interrupt the pending ranks. `check` repeats this, because an engine ignores an interrupt just
        before it begins a cell and just after its end."""
        self._interrupted_mono_s = time.monotonic()
        self._ranks.interrupt(self.pending())

    def outcome(self) -> tuple[list[RankFailure], list[int]]:
        """Return (the failures in the order of the ranks' replies, the ranks that were merely freed), once
        none is pending.

        A rank that was freed from a collective raises a network error, as does one whose connection fails by
        itself. Whether the error is a cause or an effect follows from what was known when ranks were freed.
        """
        if any(result.ready() and result.exception() is not None for result in self._results.values()):
            self.check()  # the last reply may say that a rank is gone
        raised = self._raised()
        if raised and not self._gone and all(f.error_type in _NETWORK_ERRORS for f in raised):
            # The peer of a killed rank gets its network error a moment before the death is known.
            time.sleep(_DEATH_PATIENCE_S)
            self.check()
        if mismatch := mismatches.explained(raised):
            return mismatch, []
        gone = [RankFailure(rank, "RankGone", how, how) for rank, how in self._gone.items()]
        # A death or a collective's timeout cuts the connections of other ranks before this watch frees them.
        is_cut_by_a_rank = bool(gone) or any(f.error_type == _TIMEOUT_ERROR for f in raised)
        # A rank with the same error as one that was not freed has failed like it, only a little later.
        causes = {
            (f.error_type, f.message)
            for f in raised
            if f.rank in self._failed_first - self._back_before and not is_cut_by_a_rank
        }

        def is_effect(failure: RankFailure) -> bool:
            if failure.error_type not in _NETWORK_ERRORS:
                return failure.error_type == _PEER_ERROR
            is_cut = is_cut_by_a_rank or failure.rank in self._freed | self._back_before
            return is_cut and (failure.error_type, failure.message) not in causes

        freed = [failure.rank for failure in raised if is_effect(failure)]
        failed = gone + [failure for failure in raised if failure.rank not in freed]
        # After a stop the ranks have no failure except their interrupts.
        return (failed, freed) if failed else (raised, [])

    def _raised(self) -> list[RankFailure]:
        """Return the failures of the ranks that have replied so far and are not gone."""
        return failures(
            {rank: r for rank, r in self._results.items() if r.ready() and rank not in self._gone}
        )

    def causes(self) -> list[RankFailure]:
        """Return the failures that made it necessary to free and interrupt the other ranks; empty after a
        stop."""
        return self.outcome()[0] if self._failed_first or self._gone else []

    @property
    def only_freed(self) -> bool:
        """Whether the ranks that are back raised only because they were freed and interrupted."""
        are_effects = all(f.error_type in (_PEER_ERROR, *_NETWORK_ERRORS) for f in self._raised())
        return self.severed and not self._failed_first and not self._gone and are_effects

    @property
    def severed(self) -> bool:
        """Whether the ranks were freed, which leaves the process group unusable."""
        return self._freed_mono_s is not None

    @property
    def left_the_group_unsure(self) -> bool:
        """Whether the group may have to be formed again. It is intact if no rank raised, or if all raised
        errors of one type."""
        if self.severed or self._gone:
            return True
        raised = failures(self._results)
        are_alike = len(raised) == len(self._results) and len({f.error_type for f in raised}) == 1
        return bool(raised) and not are_alike
