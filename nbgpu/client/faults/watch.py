"""Brings every rank back: once one has failed or is gone, the others are freed from waiting for it.

A rank that waits in a collective for a rank that raised would wait until the collective times out, after half
an hour. It is cut off from its process groups, which frees it at once; a rank that computes is interrupted a
moment later.
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
_GIVE_UP_AFTER_S = 1.7
_GIVE_UP_AFTER_CPU_S = 1.5
_GIVE_UP_AT_LAST_S = 15.0
_DEATH_PATIENCE_S = 0.1
_NETWORK_ERRORS = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "KeyboardInterrupt",
)
"""The errors of a rank that was freed from a collective, or whose peer went away."""

_TOO_LONG = "CollectiveTimeoutError"
"""The error of a rank that has given up a collective, and has cut the others off with it
(engine/group/collective_timeout.py)."""
_ECHO = "PeerFailed"
"""The error with which a rank of a training run says that another rank has failed
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
        self._news = threading.Event()
        for result in results.values():
            result.add_done_callback(lambda _: self._news.set())

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank comes back, at most `timeout_s`."""
        self._news.wait(timeout_s)
        self._news.clear()

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
        if (
            self._freed_mono_s is None
            or (since_s := time.monotonic() - self._freed_mono_s) < _GIVE_UP_AFTER_S
        ):
            return []
        pending = self.pending()
        if since_s <= _GIVE_UP_AT_LAST_S:
            uses = self._ranks.core_uses(pending)
            if not all(self._had_enough_time(rank, uses.get(rank), since_s) for rank in pending):
                return []
        return pending

    def _had_enough_time(self, rank: int, used: CoreUse | None, since_s: float) -> bool:
        """Return whether a rank has had enough time to come back, even on a host where many threads share few
        cores."""
        before = self._use_when_freed.get(rank)
        if self._ranks.is_ending(rank) or used is None or before is None:
            return False
        waited_s = used.waited_s - before.waited_s
        return used.had_s - before.had_s > _GIVE_UP_AFTER_CPU_S or since_s - waited_s > _GIVE_UP_AFTER_S

    def check(self) -> None:
        """Look at every rank, and free the others if one has failed. Call whenever something may be new.

        Raises:
            ClusterError: no rank can be reached any more.
        """
        if self.pending():
            self._ranks.require_reachable()
        back = {
            rank: result
            for rank, result in self._results.items()
            if result.ready() and rank not in self._gone
        }
        failed = {failure.rank for failure in failures(back)}
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
        self._freed = set(self.pending())
        self._freed_mono_s = time.monotonic()
        self._ranks.sever()
        # Of the ranks on another host this takes a message there and back.
        self._use_when_freed = self._ranks.core_uses(self._freed)

    @uninterrupted()
    def stop(self) -> None:
        """Interrupt and free the ranks that still work, and wait a moment for them; this is what Stop
        does."""
        self._interrupt()
        self.free()
        while self.pending() and not self.stuck():
            time.sleep(0.01)
            self.check()
            take_interrupt()

    def _interrupt(self) -> None:
        """Interrupt the ranks, repeatedly: an engine that is just about to begin or to end the cell ignores
        an interrupt."""
        self._interrupted_mono_s = time.monotonic()
        self._ranks.interrupt(self.pending())

    def outcome(self) -> tuple[list[RankFailure], list[int]]:
        """Return (the failures in the order of the ranks' replies, the ranks that were merely freed), once
        none is pending.

        A rank that was freed from a collective raises a network error, as does one whose connection fails by
        itself. The causes are told from the effects by what was known when the first rank was freed.

        A rank whose peer is killed gets a network error a moment before the peer's end is known, so the end
        is waited for before such an error is taken for the cause.
        """
        if failures({rank: result for rank, result in self._results.items() if result.ready()}):
            self.check()  # the last answer may be the news that a rank is gone
        raised = failures(
            {rank: r for rank, r in self._results.items() if r.ready() and rank not in self._gone}
        )
        if raised and not self._gone and all(f.error_type in _NETWORK_ERRORS for f in raised):
            time.sleep(_DEATH_PATIENCE_S)
            self.check()
        if mismatch := mismatches.explained(raised):
            return mismatch, []
        gone = [RankFailure(rank, "RankGone", how, how) for rank, how in self._gone.items()]
        # A death, or a collective that took too long, has cut connections before anybody freed a rank.
        cut_by_a_rank = gone or any(f.error_type == _TOO_LONG for f in raised)
        # A rank with the same error as one that was not freed has failed like it, only a little later.
        alike = {
            (f.error_type, f.message)
            for f in raised
            if f.rank in self._failed_first - self._back_before and not cut_by_a_rank
        }
        freed = [
            f.rank
            for f in raised
            if f.error_type == _ECHO
            or (
                f.error_type in _NETWORK_ERRORS
                and (f.error_type, f.message) not in alike
                and (cut_by_a_rank or f.rank in self._freed | self._back_before)
            )
        ]
        real = gone + [f for f in raised if f.rank not in freed]
        # After a Stop there is no failure other than the interrupts themselves.
        return (real, freed) if real else (raised, [])

    def causes(self) -> list[RankFailure]:
        """Return the failures from before any rank was freed or interrupted: the reason why the others had to
        be."""
        return self.outcome()[0] if self._failed_first or self._gone else []

    @property
    def only_freed(self) -> bool:
        """Whether the ranks that are back have no other fault than that they were freed and interrupted."""
        raised = failures({rank: result for rank, result in self._results.items() if result.ready()})
        are_effects = all(f.error_type == _ECHO or f.error_type in _NETWORK_ERRORS for f in raised)
        return self.severed and not self._failed_first and not self._gone and are_effects

    @property
    def severed(self) -> bool:
        """Whether the ranks were cut off from their groups."""
        return self._freed_mono_s is not None

    @property
    def left_the_group_unsure(self) -> bool:
        """Whether the group may have to be formed again: it need not be if every rank ended in the same way
        by itself."""
        if self.severed or self._gone:
            return True
        raised = failures(self._results)
        return bool(raised) and not (
            len(raised) == len(self._results) and len({failure.error_type for failure in raised}) == 1
        )
