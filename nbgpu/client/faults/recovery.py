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
_RESUMED_PATIENCE_S = 10.0
"""How long a rank may take to come back whose process was suspended and has been resumed."""
_FREED_PATIENCE_S = 5.0
"""How long a rank may take to come back after it was freed."""
_WATCH_PERIOD_S = 0.1
_POLL_PERIOD_S = 0.01
_MAX_REPLACEMENTS = 3
"""How often dead ranks are replaced if others die meanwhile."""


class Recovery:
    """Repairs the ranks of a running cluster, between two cells and after each of them."""

    def __init__(self, state: ClusterState, changes: RankChanges) -> None:
        self._state = state
        self.hosts = LostHosts(state, changes, self._renumber)
        self.forget()

    def forget(self) -> None:
        """Begin with no record of ranks, because other engines are started."""
        self._abandoned: dict[int, Reply] = {}
        """The pending replies to a cell from which ranks did not come back, by rank."""
        self._submitted: dict[int, Reply] = {}
        """The pending replies to the newest cell for which no caller waits, by rank."""
        self._freed_mono_s = -math.inf
        """When the ranks of a submitted or an abandoned cell were last freed, by the monotonic clock."""
        self._stood_still: set[int] = set()
        """The ranks whose processes were suspended when the cell was abandoned."""
        self._empty: set[int] = set()
        """The ranks with a new engine that no message has mentioned yet."""
        self._reported_signals: set[str] = set()
        self.hosts.places.clear()

    def make_ready(self, last_run: Path | None) -> None:
        """Make sure that all ranks are alive, idle and in one process group before work is sent. Call in an
        `uninterrupted` block.

        Args:
            last_run: the folder of the ranks' last run, or None if there was none.

        Raises:
            ClusterError: ranks were replaced, and the person must know that they are empty before code is
                sent to them; or ranks are still in an earlier cell.
        """
        self._replace_dead_ranks()
        self._readmit_abandoned_ranks(last_run)
        self._repair_after_cells()

    def _replace_dead_ranks(self) -> None:
        """Replace ranks whose processes ended between two cells; if none has, start ranks on hosts that are
        back.

        Raises:
            ClusterError: there are new, empty ranks, which the message names, or a lost host is given up.
        """
        gone = self._state.ranks.gone_together()
        if gone:
            ended: list[str] = []
            try:
                message = self.replace_all_gone(ended=ended)
            except HostsGivenUpError as error:
                # The error is about the lost hosts. Ranks that have ended on other hosts are named, too.
                lost = self.hosts.ranks_on(self._state.pool.lost())
                on_lost = {how for rank, how in self._state.ranks.gone().items() if rank in lost}
                others = "; ".join(how for how in ended if how not in on_lost)
                raise ClusterError(f"{sentence(others)} {error}" if others else str(error)) from None
            self._state.ranks.add_spares(self._state.config.spare)
            raise ClusterError(
                f"Between two cells, {sentence('; '.join(ended))} {message}\nNothing was run: run it again"
            )
        if came := self.hosts.readmit_hosts():
            raise ClusterError(f"{came}\nNothing was run: run it again")

    def _readmit_abandoned_ranks(self, last_run: Path | None) -> None:
        """Form the group again if the ranks of an abandoned cell are back, or if an earlier attempt to form
        it was interrupted.

        Raises:
            ClusterError: a rank is not back.
        """
        if not self._abandoned and self._state.ranks.group_is_whole:
            return
        if self._stood_still & set(self._busy()) and not self._state.ranks.standstills(self._busy()):
            # A suspended rank has resumed. It may only now begin a cell that was stopped meanwhile.
            self.stop_cell()
            # On a busy machine such a rank takes longer to come back than any other.
            self._wait_while_busy(time.monotonic() + _RESUMED_PATIENCE_S)
        self._wait_while_busy(self._freed_mono_s + _FREED_PATIENCE_S)
        if busy := self._busy():
            raise ClusterError(self._describe_busy(busy))
        self._abandoned = {}
        self._stood_still = set()
        self._state.news += self._form_group()
        if last_run is not None:
            # The ranks may have been stuck when the last run ended, so they still hold its model in memory.
            self._state.ranks.call(Call.LET_GO_OF_RUN, str(last_run))

    def _describe_busy(self, ranks: Sequence[int]) -> str:
        """Return a message about ranks that are still in an abandoned cell, with what the person can do."""
        message = f"rank(s) {', '.join(map(str, ranks))} are still in an earlier cell"
        standstills = self._state.ranks.standstills(ranks)
        restarts = ", ".join(f"%nbgpu restart --rank {rank}" for rank in standstills or ranks)
        if standstills:
            reasons = [f"rank {rank} does not answer: {reason}" for rank, reason in standstills.items()]
            return f"{message}. {'; '.join(reasons)}. To give up the rank's variables instead: {restarts}"
        return (
            f"{message}. Wait for them, or stop it with nbgpu.current().stop_cell(), which C code may not hear. If "
            f"neither helps, give up their variables: {restarts}"
        )

    def _repair_after_cells(self) -> None:
        """Form the group again if a cell's code has ended it, and report the signal handlers that a cell has
        replaced and the ranks have restored."""
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
        """Wait until the ranks are back, and form the group again if necessary. If a rank fails, the others
        are freed.

        Args:
            watch: the watch over these ranks.
            results: the pending replies, by rank.
            stop: stops the ranks, as the stop button does, when it is set.
            show: is called several times a second meanwhile.

        Raises:
            RankError: ranks failed.
            ClusterError: ranks did not come back although they were freed and interrupted, and none failed.
            RunError: `stop` was set.
            KeyboardInterrupt: the kernel was interrupted; the ranks were stopped, too.
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
        """Stop the ranks as the stop button would, and form the group again if all come back."""
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
        """Once all ranks are back or gone, replace those that are gone, and form the group again if the cell
        may have disturbed it.

        Args:
            watch: the watch over the results.
            results: the pending replies, by rank.
            failed: ranks that raised, whose copy of a model is not trusted if the ranks' copies differ.

        Returns:
            Lines that tell the person what happened. Errors are among them, because the person must first see
            the errors that the ranks raised.
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
            if not self._busy():
                self.abandon_cell(results)
            return [
                f"the process group could not be formed again, and the next cell tries once more: {error}"
            ]
        except KeyboardInterrupt:
            # The caller reports how the cell ended, so the interrupt is not raised.
            return ["the forming of the process group was stopped, and the next cell forms it"]
        return []

    def _form_group(self, failed: Sequence[int] = ()) -> list[str]:
        """Form the process group again (`Ranks.regroup`). Return a line for each variable that belonged to
        the old group and has to be made again.

        If a rank does not join in time, the cell counts as abandoned: the next cell is refused until that
        rank is back or restarted.

        Args:
            failed: ranks whose copy of a model is not trusted if the ranks' copies differ.

        Raises:
            ClusterError: a rank did not join in time, or its process ended.
            RankError: a rank failed to join, in each of several attempts.
        """
        try:
            return self._state.ranks.regroup(failed)
        except RanksLateError as error:
            self.abandon_cell(error.pending)
            raise ClusterError(
                f"{error}. {self._describe_absence(list(error.pending), error.pending)}"
            ) from None

    def _describe_absence(self, ranks: Sequence[int], results: Mapping[int, Reply]) -> str:
        """Return a message about ranks that did not come back: what each is doing, and what the person can
        do."""
        with closing(HangWatch(self._state.stack_sampler(), results, len(self._state.ranks), 0)) as hangs:
            return hangs.not_back(ranks)

    def replace_gone(self, waiting: Waiting | None = None, ended: MutableSequence[str] | None = None) -> str:
        """Give new engines to ranks whose processes have ended; return a message about what happened.

        For ranks on a lost host the cluster's `on_host_lost` decides.

        Args:
            waiting: how to wait for a lost host, as for `LostHosts.go_on`.
            ended: a list to which a line for each of these ranks is added, which says how it ended.
        """
        ended = [] if ended is None else ended
        # `gone` is read again below: `go_on` may remove ranks of a lost host, and others may end meanwhile.
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
            # Ranks that have got their new engine are named in the next message; the others are still gone.
            self._empty |= set(gone) - set(self._state.ranks.gone())
            if isinstance(error, KeyboardInterrupt):
                self._state.news += self._report_replaced(())
            raise
        return "\n".join([*lines, *self._report_replaced(gone), *lost])

    def _report_replaced(self, gone: Iterable[int]) -> list[str]:
        """Return a line about these ranks, which have just got new engines, and about those in `_empty`; no
        line if there are none."""
        replaced = sorted(self._empty.union(gone))
        self._empty.clear()
        return [self._describe_replaced(replaced)] if replaced else []

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Apply new numbers of ranks to all that is kept by rank. `numbers` has the new number of each rank
        that stays, by its former number."""
        self._submitted = {numbers[rank]: reply for rank, reply in self._submitted.items() if rank in numbers}
        self._abandoned = {numbers[rank]: reply for rank, reply in self._abandoned.items() if rank in numbers}
        self._stood_still = {numbers[rank] for rank in self._stood_still if rank in numbers}
        self._empty = {numbers[rank] for rank in self._empty if rank in numbers}

    def replace_all_gone(
        self, waiting: Waiting | None = None, ended: MutableSequence[str] | None = None
    ) -> str:
        """Call `replace_gone`, with the same arguments, again for ranks that die meanwhile.

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
        """Return a message that says that these ranks are new and empty, which ranks kept their variables,
        and how to run the cells of a new rank again."""
        kept = [rank for rank in range(len(self._state.ranks)) if rank not in ranks]
        return (
            f"{named_ranges(ranks)} {'was replaced and is' if len(ranks) == 1 else 'were replaced and are'} empty; "
            + (f"{named_ranges(kept)} kept all variables. " if kept else "no rank kept its variables. ")
            + " ".join(f"%nbgpu restart --rank {rank} --replay runs its cells again." for rank in ranks)
        )

    def abandon_cell(self, results: Mapping[int, Reply]) -> None:
        """Give up a cell from which ranks did not come back. Until they do, no other cell is sent, and
        questions that they ask by `input()` are not answered."""
        self._state.stop_listening()
        self._abandoned = dict(results)
        # The ranks were freed and interrupted. On a busy machine some come back a moment later.
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
        """Keep the pending replies to a cell for which no caller waits, so that `stop_cell` can stop it, and
        free its ranks when one of them fails."""
        self._submitted = dict(results)
        ranks = self._state.ranks
        generation = ranks.assignment.generation

        def on_answer(_: object) -> None:
            pending = [result for result in results.values() if not result.ready()]
            if pending and failures({rank: r for rank, r in results.items() if r.ready()}):
                # Callbacks run on ipyparallel's thread, which `sever` needs to send messages to hosts.
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
        """Stop a submitted or abandoned cell, for which no caller waits, as the stop button would."""
        RankWatch(self._state.ranks, {**self._submitted, **self._abandoned}).stop()

    @uninterrupted()
    def adopt_cell(self) -> None:
        """Take over the cell that was running when the notebook ended: wait a moment for its end, and form
        the group again if it failed. A cell that goes on counts as abandoned."""
        group_is_whole = self._state.ranks.group_is_whole
        if not group_is_whole:
            # The notebook ended while the group was formed, so some ranks wait for ranks that were never
            # called.
            self._state.ranks.sever()
        self._abandoned = self._state.ranks.call(Call.LAST_CELL_FAILED)
        answered_by_s = time.monotonic() + (_ANSWER_PATIENCE_S if group_is_whole else _FREED_PATIENCE_S)
        for result in self._abandoned.values():
            result.wait(max(0.0, answered_by_s - time.monotonic()))
        if all(result.ready() for result in self._abandoned.values()):
            replies, self._abandoned = self._abandoned, {}
            if any(collect(replies).values()) or not group_is_whole:
                self._form_group()

    @uninterrupted()
    def restart(self, rank: int, replay: bool) -> str:
        """End a rank and put a new engine in its place; return a message about what happened.

        Other ranks that are still in an earlier cell are stopped. A rank that does not come back even then is
        replaced as well, because the group cannot be formed without it.

        Args:
            rank: the rank to end.
            replay: whether to run the rank's cells again on its new engine.
        """
        given_up = [rank, *self._stop_all_but(rank)]
        lines_by_rank: dict[int, list[str]] = {}

        def run_again(rank: int) -> None:
            lines_by_rank[rank] = self._state.history.run_again(rank, self._state.ranks[rank])

        if not replay:
            # `lines_by_rank` is filled here instead; the last rank's line also names those that were kept.
            for ended in given_up:
                self._state.history.forget(ended)
                lines_by_rank[ended] = ["it is empty"]
            kept = [r for r in range(len(self._state.ranks)) if r not in given_up]
            lines_by_rank[given_up[-1]][0] += f"; {named_ranges(kept)} kept all variables" if kept else ""
        lost = self._state.ranks.replace(given_up, run_again if replay else None)
        self._state.ranks.add_spares(self._state.config.spare)
        because = " was still in an earlier cell, did not come back, and was given up as well. It"
        lines = []
        for ended in given_up:
            first, *others = lines_by_rank[ended]
            named = f"rank {ended}{'' if ended == rank else because}"
            lines += [f"{named} has a new process, {self._state.ranks.pids[ended]}: {first}", *others]
        return "\n".join([*lines, *lost])

    def _stop_all_but(self, rank: int) -> list[int]:
        """Stop the other ranks that are still in an abandoned cell; return those that do not come back."""
        others = {r: result for r, result in self._abandoned.items() if r != rank}
        watch = RankWatch(self._state.ranks, others)
        if watch.pending():
            watch.stop()
        self._abandoned = {}
        return watch.pending()
