"""Decides how to recover from a failure on the ranks, and does so.

A rank that waits for another is freed, a rank whose process has ended is replaced, and a group that can no
longer be trusted is formed again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from contextlib import closing, suppress
from pathlib import Path

from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import RanksLateError, collect, failures, sentence
from nbgpu.client.engines.standstill_notice import StandstillNotice
from nbgpu.client.faults.hangs import HangWatch
from nbgpu.client.faults.lost_hosts import HostsGivenUpError, LostHosts, Waiting
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.errors import ClusterError, NbgpuError, RankError, RunError, who_keeps_variables
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.text.ranks import named_ranges

_ANSWER_PATIENCE_S = 1.0
_GOES_ON_PATIENCE_S = 10.0
_FREED_PATIENCE_S = 5.0
_WATCH_PERIOD_S = 0.1
_POLL_PERIOD_S = 0.01
_MAX_REPLACEMENTS = 3


class Recovery:
    """Repairs the ranks of a running cluster, between two cells and after each of them."""

    def __init__(self, state: ClusterState, changes: RankChanges) -> None:
        self._state = state
        self.hosts = LostHosts(state, changes, self._renumber)
        self.forget()

    def forget(self) -> None:
        """Forget what is known of the engines, because other ones are started."""
        self._abandoned: dict[int, Reply] = {}
        """The cells from which ranks did not come back, by rank."""
        self._submitted: dict[int, Reply] = {}
        """The newest cell for which no caller waits, by rank."""
        self._freed_mono_s = -math.inf
        """When ranks were last freed: those of a submitted cell in which one failed, or of a cell that was
        given up."""
        self._stood_still: set[int] = set()
        """The ranks whose processes were stopped when the cell was abandoned."""
        self._empty: set[int] = set()
        """The ranks with a new engine about which the person has not read yet."""
        self._reported_signals: set[str] = set()
        self.hosts.places.clear()

    def make_ready(self, last_run: Path | None) -> None:
        """Make sure that all ranks are there and free before work is sent, or say why they are not. Call in
        an `uninterrupted` block.

        Args:
            last_run: the folder of the ranks' last run, or None if there was none.

        Raises:
            ClusterError: ranks were replaced, which must be known before anything is sent, or are still in an
                earlier cell.
        """
        self._replace_ranks_that_went()
        self._readmit_abandoned_ranks(last_run)
        self._repair_after_cells()

    def _replace_ranks_that_went(self) -> None:
        """Replace ranks that ended between two cells, and say so before the next cell meets empty ranks."""
        gone = self._state.ranks.gone_together()
        if gone:
            ended: list[str] = []
            try:
                message = self.replace_all_gone(ended=ended)
            except HostsGivenUpError as error:
                # Another host may have been lost, and given up, a moment before.
                earlier = [] if ended == list(gone.values()) else [sentence("; ".join(ended))]
                raise ClusterError(" ".join([*earlier, str(error)])) from None
            self._state.ranks.add_spares(self._state.config.spare)
            raise ClusterError(
                f"Between two cells, {sentence('; '.join(ended))} {message}\nNothing was run: run it again"
            )
        if came := self.hosts.readmit_hosts():
            raise ClusterError(f"{came}\nNothing was run: run it again")

    def _readmit_abandoned_ranks(self, last_run: Path | None) -> None:
        """Form the group again if the ranks of an abandoned cell are back, or if the forming was cut short.

        Raises:
            ClusterError: a rank is not back.
        """
        if not self._abandoned and self._state.ranks.group_is_whole:
            return
        if self._stood_still & set(self._busy()) and not self._state.ranks.standstills(self._busy()):
            # The rank goes on, perhaps with a cell that was stopped before the rank had begun it.
            self.stop_cell()
            # On a busy machine such a rank takes longer to come back than any other.
            self._wait_while_busy(time.monotonic() + _GOES_ON_PATIENCE_S)
        self._wait_while_busy(self._freed_mono_s + _FREED_PATIENCE_S)
        if busy := self._busy():
            named = ", ".join(map(str, busy))
            standing = self._state.ranks.standstills(busy)
            message = f"rank(s) {named} are still in an earlier cell"
            if standing:
                reasons = "; ".join(
                    f"rank {rank} does not answer: {reason}" for rank, reason in standing.items()
                )
                ways_out = ", ".join(f"%nbgpu restart --rank {rank}" for rank in standing)
                raise ClusterError(
                    f"{message}. {reasons}. To give up the rank's variables instead: {ways_out}"
                )
            raise ClusterError(
                f"{message}. Wait for them, or stop it with nbgpu.current().stop_cell(), which C code may not hear. If "
                f"neither helps, give up their variables: {', '.join(f'%nbgpu restart --rank {rank}' for rank in busy)}"
            )
        self._abandoned = {}
        self._stood_still = set()
        self._state.news += self._form_group()
        if last_run is not None:
            # The ranks did not hear that the run was stopped, so it has not been ended there, and its model
            # takes up memory.
            self._state.ranks.call(Call.LET_GO_OF_RUN, str(last_run))

    def _repair_after_cells(self) -> None:
        """Form the group again if a cell has ended it, and name the signal handlers that the ranks have
        restored."""
        if ended := self._state.ranks.without_group():
            lines = self._form_group()
            self._state.news += [
                f"{named_ranges(ended)} had ended the process group (dist.destroy_process_group()), and it was "
                "formed again",
                *lines,
            ]
        for name, ranks in self._state.ranks.signals_taken().items():
            if name not in self._reported_signals:
                self._reported_signals.add(name)
                self._state.news.append(
                    f"{name}: its handler, which a cell replaced on {named_ranges(ranks)}, is back. A handler of your own "
                    f"for {name} lasts as long as its cell, because without the cluster's own a rank could not be stopped"
                )

    @uninterrupted()
    def bring_back(
        self,
        watch: RankWatch,
        results: Mapping[int, Reply],
        stop: threading.Event | None = None,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the ranks, and repair the group. Meanwhile `watch.check` frees those that wait for one
        that failed.

        Args:
            watch: watches these ranks.
            results: the pending replies, by rank.
            stop: ends the wait, as the stop button does, when it is set.
            show: is called again and again meanwhile.

        Raises:
            RankError: ranks failed.
            ClusterError: ranks did not come back although they were freed and interrupted, and none failed.
            RunError: `stop` was set.
            KeyboardInterrupt: the person stopped it; the ranks were stopped, too.
        """
        is_stopped = False
        try:
            with StandstillNotice(self._state.ranks.standstills) as notice:
                while watch.pending() and not watch.stuck() and not is_stopped:
                    watch.wait(_WATCH_PERIOD_S)
                    watch.check()
                    take_interrupt()
                    notice.check(results)
                    show()
                    is_stopped = stop is not None and stop.is_set()
        except KeyboardInterrupt:
            self.stop(watch, results)
            raise
        if is_stopped:
            self.stop(watch, results)
            raise RunError(f"stopped; {who_keeps_variables(watch.gone, len(self._state.ranks))}")
        if stuck := watch.stuck():
            self.abandon_cell(results)
            message = self._describe_absence(stuck, results)
            if causes := watch.causes():
                raise RankError(causes, len(self._state.ranks), message)
            raise ClusterError(message)
        failed, _ = watch.outcome()
        world_size = len(self._state.ranks)
        self._state.news += self.restore_group(watch, results, [failure.rank for failure in failed])
        if failed:
            raise RankError(failed, world_size)

    def stop(self, watch: RankWatch, results: Mapping[int, Reply]) -> None:
        """Stop the ranks as the stop button would, and repair the group if all come back."""
        try:
            watch.stop()
        except KeyboardInterrupt:
            self.abandon_cell(results)
            raise
        if watch.stuck():
            self.abandon_cell(results)
        else:
            self._state.news += self.restore_group(watch, results)

    @uninterrupted()
    def restore_group(
        self, watch: RankWatch, results: Mapping[int, Reply], failed: Sequence[int] = ()
    ) -> list[str]:
        """Repair the group once all ranks are back or gone; replace those that are gone.

        Args:
            watch: the watch over the results.
            results: the pending replies, by rank.
            failed: ranks that raised, whose state is not trusted if the ranks differ.

        Returns:
            Lines for the person.
        """
        try:
            if watch.gone and (message := self.hosts.what_the_next_cell_does()):
                return [message]
            if watch.gone:
                lines = [self.replace_gone()]
                self._state.ranks.add_spares(self._state.config.spare)
                return lines
            if watch.left_the_group_unsure and (watch.severed or not self._state.ranks.untouched_by_cell()):
                return self._form_group(failed)
        except HostsGivenUpError as error:
            return [str(error)]
        except NbgpuError as error:
            # The person must see the errors that the ranks raised, and not this one.
            if not self._busy():
                self.abandon_cell(results)
            return [
                f"the process group could not be formed again, and the next cell tries once more: {error}"
            ]
        except KeyboardInterrupt:
            # The cell is over, and reports how it ended.
            return ["the forming of the process group was stopped, and the next cell forms it"]
        return []

    def _form_group(self, failed: Sequence[int] = ()) -> list[str]:
        """Form the process group again; see `Ranks.regroup`.

        A rank that does not come is treated like one that did not come back from a cell: the next cell does
        not wait for it, and a restart ends it.
        """
        try:
            return self._state.ranks.regroup(failed)
        except RanksLateError as error:
            self.abandon_cell(error.pending)
            raise ClusterError(
                f"{error}. {self._describe_absence(list(error.pending), error.pending)}"
            ) from None

    def _describe_absence(self, ranks: Sequence[int], results: Mapping[int, Reply]) -> str:
        """Return what each of these ranks is doing that did not come back, and what the person can do."""
        with closing(HangWatch(self._state.stack_sampler(), results, len(self._state.ranks), 0)) as hangs:
            return hangs.not_back(ranks)

    def replace_gone(self, waiting: Waiting | None = None, ended: MutableSequence[str] | None = None) -> str:
        """Give new engines to ranks whose processes have ended; return what happened, in words.

        Where their host is lost, the cluster's `on_host_lost` says what happens.

        Args:
            waiting: how to wait for a lost host, as for `LostHosts.go_on`.
            ended: is given a line for each of these ranks, which says how it ended.
        """
        ended = [] if ended is None else ended
        # Asked again below: a lost host's ranks may have left the group by then, and others may have ended.
        ended.extend(how for how in self._state.ranks.gone().values() if how not in ended)
        lines = self.hosts.go_on(waiting)
        gone = self._state.ranks.gone_together()
        ended.extend(how for how in gone.values() if how not in ended)
        try:
            if gone:
                lost = self._state.ranks.replace(list(gone), on=self.hosts.places)
                self.hosts.places.clear()
            else:
                lost = self._form_group()
        except BaseException as error:
            # Ranks that have not got their new engine are still gone, and the next cell reports them.
            self._empty |= set(gone) - set(self._state.ranks.gone())
            if isinstance(error, KeyboardInterrupt):
                self._state.news += self._report_replaced(())
            raise
        return "\n".join([*lines, *self._report_replaced(gone), *lost])

    def _report_replaced(self, gone: Iterable[int]) -> list[str]:
        """Return a line about these ranks, which have just got new engines, and those that no line has
        reported yet."""
        replaced = sorted(self._empty.union(gone))
        self._empty.clear()
        return [self._describe_replaced(replaced)] if replaced else []

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Give all that is kept by rank the ranks' new numbers, by those from before; others are lost."""
        self._submitted = {numbers[rank]: reply for rank, reply in self._submitted.items() if rank in numbers}
        self._abandoned = {numbers[rank]: reply for rank, reply in self._abandoned.items() if rank in numbers}
        self._stood_still = {numbers[rank] for rank in self._stood_still if rank in numbers}
        self._empty = {numbers[rank] for rank in self._empty if rank in numbers}

    def replace_all_gone(
        self, waiting: Waiting | None = None, ended: MutableSequence[str] | None = None
    ) -> str:
        """Do the work of `replace_gone`, and also replace ranks that die meanwhile.

        Args:
            waiting: as for `replace_gone`.
            ended: as for `replace_gone`.

        Raises:
            NbgpuError: a rank cannot be replaced, or ranks keep dying.
        """
        for _ in range(_MAX_REPLACEMENTS - 1):
            try:
                return self.replace_gone(waiting, ended)
            except HostsGivenUpError:
                raise
            except NbgpuError:
                if not self._state.ranks.gone():
                    raise
        return self.replace_gone(waiting, ended)

    def _describe_replaced(self, ranks: Sequence[int]) -> str:
        """Say that these ranks are new and empty, which ranks kept their variables, and how to get more
        back."""
        kept = [rank for rank in range(len(self._state.ranks)) if rank not in ranks]
        return (
            f"{named_ranges(ranks)} {'was replaced and is' if len(ranks) == 1 else 'were replaced and are'} empty; "
            + (f"{named_ranges(kept)} kept all variables. " if kept else "no rank kept its variables. ")
            + " ".join(f"%nbgpu restart --rank {rank} --replay runs its cells again." for rank in ranks)
        )

    def abandon_cell(self, results: Mapping[int, Reply]) -> None:
        """Keep the pending replies of ranks that did not come back from a cell. Until they do, the ranks get
        no other cell, and their questions no answers."""
        self._state.stop_listening()
        self._abandoned = dict(results)
        # They were freed and interrupted. On a busy machine some come back a moment after they were given up.
        self._freed_mono_s = time.monotonic()
        self._stood_still = set(self._state.ranks.standstills(self._busy()))

    def _wait_while_busy(self, give_up_mono_s: float) -> None:
        while self._busy() and time.monotonic() < give_up_mono_s:
            time.sleep(_POLL_PERIOD_S)
            take_interrupt()

    def _busy(self) -> list[int]:
        """Return the ranks of the abandoned cell that are not back."""
        return [rank for rank, result in self._abandoned.items() if not result.ready()]

    def note_submitted(self, results: Mapping[int, Reply]) -> None:
        """Keep a cell for which no caller waits, so that `stop_cell` reaches it, and free its ranks when one
        of them fails."""
        self._submitted = dict(results)
        ranks = self._state.ranks
        generation = ranks.assignment.generation

        def on_answer(_: object) -> None:
            pending = [result for result in results.values() if not result.ready()]
            if pending and failures({rank: r for rank, r in results.items() if r.ready()}):
                # This is ipyparallel's thread, and hosts are reached through it.
                threading.Thread(target=free, name="nbgpu-free-submitted", daemon=True).start()

        def free() -> None:
            if self._state.started_ranks is not ranks:
                return  # the cluster was stopped meanwhile
            with suppress(NbgpuError):  # the cluster is ending, and its ranks with it
                self._freed_mono_s = time.monotonic()
                self._abandoned = dict(results)
                ranks.sever(generation)

        for result in results.values():
            result.add_done_callback(on_answer)

    def stop_cell(self) -> None:
        """Stop a cell that ranks are still in although no caller waits for it, as the stop button would."""
        RankWatch(self._state.ranks, {**self._submitted, **self._abandoned}).stop()

    @uninterrupted()
    def adopt_cell(self) -> None:
        """Take over the cell that was running when the notebook ended: wait a moment for it, and form the
        group again if it failed. A cell that goes on counts as abandoned."""
        group_is_whole = self._state.ranks.group_is_whole
        if not group_is_whole:
            # The notebook ended while the group was formed: the ranks that came wait for ranks that were not
            # called.
            self._state.ranks.sever()
        self._abandoned = self._state.ranks.call(Call.LAST_CELL_FAILED)
        answered_by_s = time.monotonic() + (_ANSWER_PATIENCE_S if group_is_whole else _FREED_PATIENCE_S)
        for result in self._abandoned.values():
            result.wait(max(0.0, answered_by_s - time.monotonic()))
        if all(result.ready() for result in self._abandoned.values()):
            asked, self._abandoned = self._abandoned, {}
            if any(collect(asked).values()) or not group_is_whole:
                self._form_group()

    @uninterrupted()
    def restart(self, rank: int, replay: bool) -> str:
        """End a rank and put a new engine in its place; return what happened, in words.

        Other ranks that are still in an earlier cell are stopped. A rank that does not come back even then is
        given up as well: without it there is no group.

        Args:
            rank: the rank to end.
            replay: whether to run the rank's cells again on its new engine.
        """
        given_up = [rank, *self._stop_all_but(rank)]
        lines_by_rank: dict[int, list[str]] = {}

        def run_again(rank: int) -> None:
            lines_by_rank[rank] = self._state.history.run_again(rank, self._state.ranks[rank])

        if not replay:
            for ended in given_up:
                self._state.history.forget(ended)
                lines_by_rank[ended] = ["it is empty"]
            kept = [r for r in range(len(self._state.ranks)) if r not in given_up]
            lines_by_rank[given_up[-1]][0] += f"; {named_ranges(kept)} kept all variables" if kept else ""
        lost = self._state.ranks.replace(given_up, run_again if replay else None)
        self._state.ranks.add_spares(self._state.config.spare)
        lines = []
        for ended in given_up:
            because = (
                ""
                if ended == rank
                else " was still in an earlier cell, did not come back, and was given up as well. It"
            )
            lines += [
                f"rank {ended}{because} has a new process, {self._state.ranks.pids[ended]}: {lines_by_rank[ended][0]}",
                *lines_by_rank[ended][1:],
            ]
        return "\n".join([*lines, *lost])

    def _stop_all_but(self, rank: int) -> list[int]:
        """Stop the cells that other ranks are still in although no caller waits; return the ranks that do not
        come back."""
        others = {r: result for r, result in self._abandoned.items() if r != rank}
        watch = RankWatch(self._state.ranks, others)
        if watch.pending():
            watch.stop()
            # The first rank that is given up ends the waiting.
            while set(watch.pending()) - set(watch.stuck()):
                time.sleep(_POLL_PERIOD_S)
                watch.check()
                take_interrupt()
        self._abandoned = {}
        return watch.stuck()
