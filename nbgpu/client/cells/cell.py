"""One distributed cell, from sending it to the last line of its output."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from nbgpu.client import presenting
from nbgpu.client.cells import cell_timeline
from nbgpu.client.cells.outputs import CellOutput, LateOutput
from nbgpu.client.cells.questions import QuestionRelay
from nbgpu.client.cells.runner import CellRunner
from nbgpu.client.engines.calls import expression
from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.results import collect, sentence
from nbgpu.client.faults.hangs import HangWatch
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.ipykernel import aborting
from nbgpu.client.ipykernel.notice import Notice
from nbgpu.client.variables import missing
from nbgpu.errors import CellInterrupted, ClusterError, NbgpuError, RankError
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import CellOptions, RankFailure
from nbgpu.text.ranks import named_ranks

_REFRESH_PERIOD_S = 0.1
"""The period in which a running cell shows new output and checks its ranks."""
_OFFER_STOP_AFTER_S = 2.0
"""A cell that runs longer than this gets a Stop button."""


class DistributedCell:
    """A cell that runs on the ranks while its output is shown.

    Args:
        runner: sends the cell to the ranks of its cluster.
        code: the cell's text.
        ranks: the ranks that run it; None for all.
        timeout_s: the time after which the ranks are interrupted; None for no limit.
        full: whether tracebacks show the frames of libraries, too.
        is_awaited: whether the cell is shown by the coroutine `show`, so that replies come on its event loop.
        number: the number of the notebook's cell, as in `In [12]`; None for the one that is running.
        timeline: whether to show at the end the timeline of every rank.
    """

    def __init__(
        self,
        runner: CellRunner,
        code: str,
        ranks: Sequence[int] | None,
        timeout_s: float | None,
        full: bool = False,
        is_awaited: bool = False,
        number: int | None = None,
        timeline: bool = False,
    ) -> None:
        """Send the cell to its ranks, and make the objects that watch the ranks and show their output."""
        self._runner = runner
        self._state = state = runner.state
        self._code = code
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self._refresh_due_s = self._started_s + _REFRESH_PERIOD_S
        aborting.note_request()
        arrivals = Arrivals()
        arrivals.take_late = LateOutput(state.config.max_output_lines).show
        # The kernel listens for `input()` before the cell is sent, because each rank is told with the cell
        # whether somebody can answer.
        self._questions = QuestionRelay(state.listen)
        try:
            shown_as = _number() if number is None else number
            options = CellOptions(shown_as, full, self._questions.are_answered, timeline)
            self._results = runner.send_cell(code, ranks, options, arrivals, is_awaited)
        except BaseException:
            self._questions.close()
            raise
        self._number = shown_as
        self._world_size = state.world_size
        """The number of ranks when the cell began; the loss of a host may change it meanwhile."""
        self._has_timeline = timeline
        self._watch = RankWatch(state.ranks, self._results)
        self._output = CellOutput(arrivals, self._results, state.config.max_output_lines)
        self._notice = Notice()
        self._final_notice = ""
        """A text that stays below a cell that was stopped while it hung."""
        self._stop_was_pressed = False
        self._remove_button: Callable[[], None] | None = None
        state.tell_news()

    async def show(self) -> None:
        """Wait for the ranks without blocking the event loop, so that buttons and panels keep working.

        Raises:
            RankError: the cell raised on one or more ranks; the others were freed, and the group was formed
                again.
            ClusterError: the cell took longer than the timeout, or a rank did not come back.
            CellInterrupted: the user interrupted the cell; the ranks were interrupted, too.
        """
        try:
            await self._until_back()
            self._finish()
        finally:
            self._close()
            self._show_timeline()

    def give_up(self) -> None:
        """End a cell for which `show` will not be called: interrupt its ranks, restore the group, and close
        the cell's output and sockets."""
        try:
            self._stop()
        finally:
            self._close()

    def note_stop(self) -> None:
        """Have `show` stop the ranks, unless they are back by then."""
        self._stop_was_pressed = True

    async def _until_back(self) -> None:
        """Wait until all ranks are back or gone, and refresh the output ten times a second.

        Replies may arrive on other threads, so they wake the event loop through an event.

        Raises:
            CellInterrupted: the person stopped the cell; the ranks were stopped first.
        """
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        wake_up = asyncio.Event()
        num_replies = itertools.count(1)

        def on_answer(answer: Answer) -> None:
            # Wake the loop for the last reply, and for a failure, after which the others must be freed. A
            # rank that is gone never replies, so with one of those every reply may be the last. Replies are
            # counted, because to check every rank at each reply would take longer than to receive them.
            is_last = next(num_replies) == len(self._results)
            if is_last or answer.exception() is not None or self._watch.gone:
                wake_loop()

        def wake_loop() -> None:
            if threading.get_ident() == thread:
                wake_up.set()
                return
            # The loop is closed if the cell was cancelled before the rank returned.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wake_up.set)

        def stop() -> None:
            self.note_stop()
            wake_loop()

        for result in self._results.values():
            result.add_done_callback(on_answer)
        try:
            while self._watch.pending():
                # Sleep until a rank wakes the loop, or the next refresh is due.
                due = loop.call_later(_REFRESH_PERIOD_S, wake_up.set)
                try:
                    await wake_up.wait()
                finally:
                    due.cancel()
                wake_up.clear()
                if not self._watch.pending():
                    break  # `_finish` shows the rest, and a Stop comes too late
                if self._stop_was_pressed:
                    raise KeyboardInterrupt
                self._refresh()
                views = presenting.cell_presenter
                if views and self._remove_button is None and self._ran_s > _OFFER_STOP_AFTER_S:
                    self._remove_button = views.offer_stop(stop)
        except (KeyboardInterrupt, asyncio.CancelledError):
            aborting.keep_what_comes_now()
            self._stop()
            # A kernel interrupts a coroutine by cancelling it, which the user sees as the same interrupt.
            raise self._interrupted() from None

    @uninterrupted()
    def show_blocking(self) -> None:
        """Wait for the ranks and show their output on the calling thread, for callers that are not
        coroutines, such as a line magic. Raises the exceptions of `show`."""
        try:
            try:
                while self._watch.pending():
                    self._watch.wait(_REFRESH_PERIOD_S)
                    take_interrupt()
                    self._refresh()
            except KeyboardInterrupt:
                aborting.keep_what_comes_now()
                self._stop()
                raise self._interrupted() from None
            self._finish()
        finally:
            self._close()
            self._show_timeline()

    def _interrupted(self) -> CellInterrupted:
        """Return the exception of a cell that the person has stopped, which names the ranks that are gone."""
        gone = set(self._watch.gone)
        # Add ranks whose processes ended after they were back, unless ranks have other numbers now.
        if self._state.world_size == self._world_size:
            gone |= self._state.ranks.gone().keys()
        return CellInterrupted(sorted(gone), self._world_size)

    @uninterrupted()
    def values(self) -> dict[int, Any]:
        """Return the value of the cell's last expression by rank; None if the cell has none. Call this after
        the cell's end."""
        # A rank's reply to a cell is its execution count, under which IPython keeps the value in `Out`.
        last_value = expression("lambda count: get_ipython().user_ns['Out'].get(count)")
        pulled = {
            rank: self._state.ranks[rank].apply_async(last_value, result.result())
            for rank, result in self._results.items()
        }
        return collect(pulled)

    @property
    def _ran_s(self) -> float:
        return time.monotonic() - self._started_s

    @cached_property
    def _hangs(self) -> HangWatch:
        """The watch for hangs, which is made at the first refresh: a cell that ends before needs none."""
        return HangWatch(
            self._state.stack_sampler(),
            self._results,
            self._state.world_size,
            self._state.config.notice_after_s,
        )

    @uninterrupted()
    def _refresh(self) -> None:
        """Check the ranks and the timeout, and show new output, questions, and a notice if ranks hang.

        Raises:
            ClusterError: the cell took longer than its timeout, or a rank did not come back.
            RankError: a rank failed, and another one did not come back.
        """
        self._watch.check()
        if not self._watch.pending() or (now_s := time.monotonic()) < self._refresh_due_s:
            return  # the output is shown at the next refresh, or at the end
        self._refresh_due_s = now_s + _REFRESH_PERIOD_S
        self._report_reloaded_modules()
        self._output.show_new()
        self._questions.check(self._results, self._output.show_above_question)
        self._hangs.check()
        self._notice.show(self._hangs.text)
        self._abandon_stuck_ranks()
        late = ", ".join(map(str, self._watch.pending()))
        if late and self._timeout_s is not None and self._ran_s > self._timeout_s:
            self._stop()
            raise ClusterError(
                f"rank(s) {late} did not finish within {self._timeout_s:g} s and were interrupted"
            )

    @uninterrupted()
    def _stop(self) -> None:
        """Interrupt and free the ranks that are still working, and restore the group."""
        # Ask for the ranks' states before the interrupt: a rank that gets stuck is then known to be silent.
        self._hangs.ask()
        if self._hangs.text:
            self._final_notice = f"until it was stopped: {self._hangs.text}"
        try:
            self._watch.stop()
        except KeyboardInterrupt:
            # This is a second Stop: the next cell waits for the ranks and restores the group.
            self._runner.recovery.abandon_cell(self._results)
            raise
        self._output.finish(without=self._watch.pending() + self._watch.gone)
        self._abandon_stuck_ranks()
        self._restore_group()

    def _report_reloaded_modules(self) -> None:
        for line in self._runner.reloading.take_messages():
            _show_line(line)

    @uninterrupted()
    def _finish(self) -> None:
        """Show the last output and restore the group; raise a RankError if ranks failed."""
        self._report_reloaded_modules()
        failed, freed = self._watch.outcome()
        self._output.finish(without=self._watch.gone)
        self._restore_group([failure.rank for failure in failed])
        if ended := self._state.ranks.without_group():
            _show_line(
                f"{named_ranks(ended)} ended the process group: the next cell gets a new one, and variables stay. A cell needs "
                "no destroy_process_group"
            )
        if freed:
            _show_line(f"freed from waiting for the others: {named_ranks(freed)}")
        if failed:
            raise RankError(failed, self._world_size, self._hint(failed))

    def _hint(self, failed: Sequence[RankFailure]) -> str:
        """Return advice about names that are defined in the notebook but not on the ranks; empty if there are
        none."""
        shell = get_ipython()
        if shell is None or all(failure.error_type != "NameError" for failure in failed):
            return ""
        return missing.hint_for_ranks(failed, self._code, shell.user_ns, self._state.ranks)

    def _restore_group(self, failed: Sequence[int] = ()) -> None:
        """Restore the group, and replace ranks whose processes have ended."""
        if self._watch.severed or self._watch.gone:
            self._state.history.forget_newest(self._results)
        if self._watch.gone:
            next_step = "" if self._state.pool.lost() else " Replacing it"
            _show_line(f"{sentence('; '.join(self._state.ranks.gone().values()))}{next_step}")
        for line in self._runner.recovery.restore_group(self._watch, self._results, failed):
            _show_line(line)

    def _abandon_stuck_ranks(self) -> None:
        """End the cell with an error if ranks did not come back although they were freed and interrupted."""
        stuck = self._watch.stuck()
        if stuck:
            self._runner.recovery.abandon_cell(self._results)
            self._state.history.forget_newest(self._results)
            explanation = self._hangs.not_back(stuck)
            if causes := self._watch.causes():
                self._output.finish(without=[*self._watch.pending(), *self._watch.gone])
                raise RankError(causes, self._state.world_size, explanation)
            raise ClusterError(explanation)

    @uninterrupted()
    def _show_timeline(self) -> None:
        """Show the timeline of the cell, if it was asked for. A cell that failed or was stopped has one up to
        that moment, unless the loss of a host has changed the ranks' numbers."""
        if not self._has_timeline or self._state.world_size != self._world_size:
            return
        try:
            timeline = cell_timeline.collect_timeline(
                self._state, list(self._results), self._watch.pending(), self._number
            )
        except NbgpuError as error:
            _show_line(f"there is no timeline of this cell: {error}")
            return
        self._state.last_timeline = timeline
        display(timeline)

    def _close(self) -> None:
        """Close the cell's output, questions and watch, remove its Stop button, and leave of its notice what
        stays (`_final_notice`)."""
        self._output.close()
        self._questions.close()
        self._notice.show(self._final_notice)
        # A cached property is in `vars` once it was used. Reading `self._hangs` would create the watch.
        if "_hangs" in vars(self):
            self._hangs.close()
        if self._remove_button is not None:
            self._remove_button()


def _number() -> int:
    """The number of the notebook's running cell, as in `In [12]`; 0 if it is not known."""
    history = getattr(get_ipython(), "history_manager", None)
    # A cell is in the history from its beginning on; before IPython 8 its number goes up at its end.
    return len(history.input_hist_raw) - 1 if history is not None else 0


def _show_line(line: str) -> None:
    """Show a line under the cell."""
    print(line, file=sys.stderr)  # noqa: T201 - the cell's output
