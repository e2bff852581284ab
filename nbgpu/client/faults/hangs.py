"""Says in words which ranks wait for which, in a cell or a run that makes no progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.stacks import StackSampler, described
from nbgpu.protocol.records import MainThreadState
from nbgpu.text.ranks import named_ranks, ranks_by

_LONGEST_PERIOD_S = 1.0
"""The time between two requests for the ranks' states, if a notice may come late enough."""
_PERIODS_BEFORE_NOTICE = 5
_SILENCE_WORTH_SAYING_S = 1.0
"""A rank that has not answered for this long is described as silent."""
_ANSWER_PATIENCE_S = 1.2
_CONFIRM_PATIENCE_S = 0.3
_GETS_READY = MainThreadState("call", busy_with="getting ready")
"""The state of a rank that has not answered since a run began."""
_FINISHED_CELL = "has finished the cell"


@dataclass(frozen=True)
class RankActivity:
    """What one rank is doing in a cell or in a run."""

    where: MainThreadState | None = None
    """The rank's state, or None if the rank has not answered yet or is no longer part of the cell or run."""
    for_s: float = 0.0
    """How long the rank has been in this state, with no traffic in its process groups, in seconds."""
    instead: str = ""
    """A text that replaces the state, such as 'has finished the cell'."""
    stands_still: bool = False
    """Whether something outside of the rank's process suspends it, such as SIGSTOP."""

    @property
    def waits(self) -> bool:
        """Whether the rank is in a collective."""
        return self.where is not None and bool(self.where.collective) and not self.instead

    @property
    def is_busy(self) -> bool:
        """Whether the others wait for work that the rank does by itself, such as the result."""
        return self.where is not None and self.where.is_busy and not self.instead

    @property
    def words(self) -> str:
        """The text that follows the rank's name, with the time."""
        if self.waits:
            return f"{self.kind}, for {self.for_s:.0f} s"
        if self.is_busy:
            return f"{self.kind}, with no progress for {self.for_s:.0f} s"
        return self.kind

    @property
    def kind(self) -> str:
        """The same text without the time, so that ranks at the same place can be grouped."""
        if self.instead:
            return self.instead
        if self.where is None:
            return "has not answered yet"
        if self.waits:
            # In a run the line would be one of nbgpu's own, so the step is named.
            place = f"step {self.where.step + 1}" if self.where.doing == "run" else self.where.place
            return f"waits in {self.where.collective}, {place}"
        if self.where.is_busy:
            within = f", in {self.where.within}" if self.where.within else ""
            return f"is {self.where.busy_with}{within}"
        return f"is {'at ' if self.where.place else ''}{described(self.where)}"


def notice(activities: Mapping[int, RankActivity], after_s: float, since_busy_s: float = math.inf) -> str:
    """Return the text of `describe_all` if a rank has waited in a collective for `after_s` or is suspended;
    otherwise an empty text.

    Args:
        activities: what each rank is doing, by rank.
        after_s: the time that ranks may wait, in seconds.
        since_busy_s: the time, in seconds, since a rank last made progress with work of its own for which the
            others had to wait. Only their waiting since then counts.
    """
    waits_s = [min(activity.for_s, since_busy_s) for activity in activities.values() if activity.waits]
    # Ranks that are all in the same collective have hung only since the last one entered it.
    are_together = (
        len(waits_s) == len(activities) and len({activity.kind for activity in activities.values()}) == 1
    )
    hangs = bool(waits_s) and (min(waits_s) if are_together else max(waits_s)) >= after_s
    hangs |= any(activity.stands_still for activity in activities.values())
    return describe_all(activities) if hangs else ""


def describe_all(activities: Mapping[int, RankActivity]) -> str:
    """Return a sentence that says which ranks wait where and which do not.

    'rank 0 waits in all_reduce, cell line 4, for 7 s; rank 1 has finished the cell'
    """
    ranks_by_kind = ranks_by((activities[rank].kind, rank) for rank in sorted(activities))
    all_wait = all(activity.waits for activity in activities.values())
    parts = []
    for ranks in ranks_by_kind.values():
        named = named_ranks(ranks)
        if all_wait and len(ranks) == len(activities) > 1:
            named = "all ranks"
        shortest = min((activities[rank] for rank in ranks), key=lambda activity: activity.for_s).words
        parts.append(f"{named} {shortest if len(ranks) == 1 else _plural(shortest)}")
    if all_wait and len(parts) > 1:
        return "; ".join(parts) + ": they wait for each other"
    return "; ".join(parts) + _uneven_batches_advice(activities)


def _uneven_batches_advice(activities: Mapping[int, RankActivity]) -> str:
    """Return advice if some ranks wait in DDP's collectives for ranks that had fewer batches; else an empty
    text."""
    in_ddp = any(
        activity.waits and activity.where.collective.startswith("DDP")
        for activity in activities.values()
        if activity.where
    )
    if not in_ddp or not any(activity.instead == _FINISHED_CELL for activity in activities.values()):
        return ""
    return ". If the ranks have unequal numbers of batches, write the loop below `with model.join():`"


def _plural(singular: str) -> str:
    """Return a predicate in the plural: 'waits in barrier' as 'wait in barrier'."""
    first, _, rest = singular.partition(" ")
    plural = {"waits": "wait", "is": "are", "has": "have", "does": "do", "was": "were"}.get(first, first)
    return f"{plural} {rest}"


class HangWatch:
    """Samples what the ranks of a cell or a run are doing, and notices when they hang.

    Args:
        sampler: the object that asks the ranks.
        results: the pending replies to the cell or the run, by rank.
        world_size: the number of ranks; some may not have been given the cell or run.
        notice_after_s: how long ranks wait in a collective before a notice appears; 0 for never.
        work: what was sent to the ranks.
        is_busy: a function that returns whether a rank's newest record in a run's folder says that it does
            work by itself, such as importing packages. The record may be newer than the rank's last answer.
    """

    def __init__(
        self,
        sampler: StackSampler,
        results: Mapping[int, Reply],
        world_size: int,
        notice_after_s: float,
        work: Literal["cell", "run"] = "cell",
        is_busy: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self._sampler = sampler
        self._results = results
        self._world_size = world_size
        self._notice_after_s = notice_after_s
        self._work = work
        self._is_busy = is_busy
        self._period_s = min(_LONGEST_PERIOD_S, notice_after_s / _PERIODS_BEFORE_NOTICE or _LONGEST_PERIOD_S)
        self._asked_mono_s = self._began_mono_s = self._busy_mono_s = time.monotonic()
        self._here_since: dict[int, tuple[MainThreadState, float]] = {}
        """The state of each rank, and when the rank was first seen in it, by the monotonic clock."""
        self.text = ""
        """The notice; empty while there is nothing to report."""
        self.longest_wait_s = 0.0
        """The longest time, in seconds, for which any rank has been suspended, or has waited in a collective
        with no traffic in its process groups."""

    def check(self) -> None:
        """Receive the ranks' answers and ask again, about once a second. Never wait."""
        self._collect_stacks()
        now_s = time.monotonic()
        if now_s - self._asked_mono_s < self._period_s:
            return
        self._asked_mono_s = now_s
        self._sampler.ask()
        activities = self._update_longest_wait()
        # `_busy_mono_s` also covers a rank that is no longer busy: it may take a moment to join the others,
        # which have waited for long.
        progress_mono_s = [now_s - activity.for_s for activity in activities.values() if activity.is_busy]
        self._busy_mono_s = max([self._busy_mono_s, *progress_mono_s])
        if self._notice_after_s:
            self.text = notice(activities, self._notice_after_s, now_s - self._busy_mono_s)

    def wait_longer_than(self, seconds: float) -> bool:
        """Return whether a rank has been suspended, or has waited in a collective, for more than `seconds`,
        and still does.

        The last answers may be a second old, so the ranks are asked again.
        """
        if self.longest_wait_s <= seconds:
            return False
        self._sampler.ask()
        self._collect_stacks(_CONFIRM_PATIENCE_S)
        self._update_longest_wait()
        return self.longest_wait_s > seconds

    def _collect_stacks(self, patience_s: float = 0.0) -> None:
        """Receive the ranks' answers, and note when each rank came into its state."""
        self._sampler.collect(patience_s)
        for rank, seen in list(self._sampler.seen.items()):
            # An answer from before this work began, such as before a run went on, is left out.
            is_current = seen.mono_s >= self._began_mono_s
            if is_current and (rank not in self._here_since or self._here_since[rank][0] != seen.where):
                self._here_since[rank] = seen.where, seen.mono_s

    def _update_longest_wait(self) -> dict[int, RankActivity]:
        """Return what each rank is doing, and keep the longest wait among them."""
        activities = self._activities()
        self.longest_wait_s = max(
            (activity.for_s for activity in activities.values() if activity.waits or activity.stands_still),
            default=0.0,
        )
        return activities

    def describe_all(self) -> str:
        """Return what all ranks are doing, whether they hang or not."""
        return describe_all(self._activities())

    def ask(self) -> None:
        """Ask the ranks now, so that one that does not answer counts as silent a moment later."""
        self._sampler.ask()

    def describe(self, rank: int) -> str:
        """Return the state of a rank that did not come back, as a text that follows its name."""
        activity = self._activity(rank)
        is_silent = bool(activity.instead) and not activity.stands_still
        line = self._sampler.cell_line(rank) if is_silent else None
        return activity.words if line is None else f"{activity.words}, at cell line {line}"

    def not_back(self, ranks: Sequence[int]) -> str:
        """Return a message about ranks that did not come back although they were freed and interrupted: what
        each is doing, why, and what the person can do."""
        are_silent = all(self._sampler.silent_s(rank) > _SILENCE_WORTH_SAYING_S for rank in ranks)
        # Ask again: answers from before the interrupts do not say how the code reacted to them.
        self._sampler.ask()
        self._collect_stacks(0.0 if are_silent else _ANSWER_PATIENCE_S)
        message = "; ".join(f"rank {rank} did not come back: it {self.describe(rank)}" for rank in ranks)
        ways_out = ", ".join(f"%nbgpu restart --rank {rank}" for rank in ranks)
        if all(self._sampler.stands_still(rank) for rank in ranks):
            return f"{message}. To give up the rank's variables instead: {ways_out}"
        different_reasons = dict.fromkeys(map(self._reason_for_absence, ranks))
        reasons = "".join(f" {reason}." for reason in different_reasons if reason)
        return f"{message}.{reasons} Wait for it to end, or give up the rank's variables: {ways_out}"

    def _reason_for_absence(self, rank: int) -> str:
        """Return why the interrupts did not bring a rank back; empty if its process is suspended."""
        if self._sampler.stands_still(rank):
            return ""
        seen = None if self._sampler.silent_s(rank) else self._here_since.get(rank)
        match seen[0].unheeded if seen is not None else "":
            case "replaced":
                return f"The code of rank {rank} has replaced the handler of SIGINT, and so no interrupt reaches it"
            case "caught":
                return (
                    f"The code of rank {rank} caught the KeyboardInterrupt of each interrupt, and went on. "
                    "nbgpu.current().stop_cell() interrupts it once more"
                )
            case "importing":
                return f"Rank {rank} imports a part of torch, which would be of no use cut in two"
        return "Code in C cannot be interrupted"

    def _activities(self) -> dict[int, RankActivity]:
        return {rank: self._activity(rank) for rank in range(self._world_size)}

    def _activity(self, rank: int) -> RankActivity:
        """Return what a rank is doing. Its reply to the work says most, then its silence, then its last
        answer."""
        if rank not in self._results:
            return RankActivity(instead=f"was not given the {self._work}")
        if self._results[rank].ready():
            raised = self._results[rank].exception() is not None
            return RankActivity(
                instead="has ended with an error" if raised else f"has finished the {self._work}"
            )
        here = RankActivity()
        if rank in self._here_since:
            where, since_mono_s = self._here_since[rank]
            here = RankActivity(where, time.monotonic() - since_mono_s)
        silent_s = self._sampler.silent_s(rank)
        if silent_s > _SILENCE_WORTH_SAYING_S:
            # An import may hold the GIL, even before the rank has answered for the first time.
            where = here.where or _GETS_READY
            # The rank's last answer may be from just before it reported that it is busy.
            may_be_busy = self._is_busy(rank) and (where.is_busy or where.doing == "call")
            if may_be_busy and self._sampler.computes(rank):
                return RankActivity(where if where.is_busy else _GETS_READY)
            return RankActivity(
                for_s=silent_s,
                instead=self._sampler.silence(rank),
                stands_still=self._sampler.stands_still(rank),
            )
        if here.is_busy:
            # The rank's progress is known only up to its last answer.
            return replace(here, for_s=max(0.0, here.for_s - silent_s))
        if here.where is not None and here.where.doing == "call" and self._work == "cell":
            return RankActivity(instead="has not begun the cell")
        return here

    def close(self) -> None:
        self._sampler.close()
