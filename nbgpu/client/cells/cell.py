"""One distributed cell, from the sending to the last line of output."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import ipyparallel as ipp
from IPython.core.getipython import get_ipython

from nbgpu.client.cells.outputs import CellOutput
from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.engines.connection import Answer, Arrivals
from nbgpu.client.engines.results import collect, sentence
from nbgpu.client.faults.hangs import HangWatch
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.ipykernel import aborting
from nbgpu.client.ipykernel.notice import Notice
from nbgpu.errors import CellInterrupted, ClusterError, RankError
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import CellOptions

_REFRESH_PERIOD_S = 0.1
_OFFER_STOP_AFTER_S = 2.0


offer_stop: Callable[[Callable[[], None]], Callable[[], None]] | None = None
"""Shows a Stop button under the cell that is running, which calls what it is given on another thread when it is pressed, and
returns what takes the button away again. The client does not know the widgets; `nbgpu.ui` connects them."""


class DistributedCell:
    """A cell that runs on the ranks while its output is shown.

    Args:
        cluster: whose ranks.
        code: the cell's text.
        ranks: which of them; None for all.
        timeout_s: after this time the ranks are interrupted; None waits as long as it takes.
        full: tracebacks show libraries' frames too.
        is_awaited: it is shown by a coroutine (`show`), whose event loop goes on meanwhile.
        number: of the notebook's cell; None for the one that runs.
    """

    def __init__(
        self,
        cluster: Cluster,
        code: str,
        ranks: Sequence[int] | None,
        timeout_s: float | None,
        full: bool = False,
        is_awaited: bool = False,
        number: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self._refresh_due_s = self._started_s + _REFRESH_PERIOD_S
        aborting.note_request()
        arrivals = Arrivals()
        self._questions = cluster.questions()
        try:
            shown_as = _number() if number is None else number
            options = CellOptions(shown_as, full, self._questions.are_answered)
            self._results = cluster.send_cell(code, ranks, options, arrivals, is_awaited)
        except BaseException:
            self._questions.close()
            raise
        self._watch = RankWatch(cluster.ranks, self._results)
        self._output = CellOutput(arrivals, self._results, cluster.config.max_output_lines)
        self._notice = Notice()
        self._last_words = ""
        self._stop_was_pressed = False
        self._take_button_away: Callable[[], None] | None = None
        cluster.tell_news()

    async def show(self) -> None:
        """Waits for the ranks without blocking the event loop, so that buttons and panels go on working.

        Raises:
            RankError: the cell raised on one rank or more; the others were freed, and the group is formed anew.
            ClusterError: it took longer than the timeout, or a rank did not come back.
            KeyboardInterrupt: the person interrupted it; the ranks were interrupted too.
        """
        try:
            await self._until_back()
            self._finish()
        finally:
            self._close()

    def give_up(self) -> None:
        """Stops the ranks; in place of showing what they do."""
        try:
            self._stop()
        finally:
            self._close()

    def note_stop(self) -> None:
        """Have `show` stop the ranks, if they are not back by then."""
        self._stop_was_pressed = True

    async def _until_back(self) -> None:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        returned = asyncio.Event()

        def wake(answer: Answer) -> None:
            # One that is back can wait for the others, unless they have to be freed from waiting for it.
            if answer.exception() is not None or not self._watch.pending():
                look()

        def look() -> None:
            if threading.get_ident() == thread:
                returned.set()
                return
            # The loop is gone if the cell was cancelled before the rank returned.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(returned.set)

        def stop() -> None:
            self.note_stop()
            look()

        for result in self._results.values():
            result.add_done_callback(wake)
        try:
            while self._watch.pending():
                due = loop.call_later(_REFRESH_PERIOD_S, returned.set)
                try:
                    await returned.wait()
                finally:
                    due.cancel()
                returned.clear()
                if self._stop_was_pressed:
                    raise KeyboardInterrupt
                self._refresh()
                if offer_stop and self._take_button_away is None and self._ran_s > _OFFER_STOP_AFTER_S:
                    self._take_button_away = offer_stop(stop)
        except (KeyboardInterrupt, asyncio.CancelledError):
            aborting.keep_what_comes_now()
            self._stop()
            # A kernel interrupts a coroutine by cancelling it; to the person it is the same thing.
            raise self._interrupted() from None

    @uninterrupted()
    def show_blocking(self) -> None:
        """The same for callers that are no coroutine, such as a line magic."""
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

    def _interrupted(self) -> CellInterrupted:
        # One may have ended after it had come back.
        lost = {*self._watch.gone, *self._cluster.ranks.gone()}
        return CellInterrupted(sorted(lost), self._cluster.world_size)

    @uninterrupted()
    def values(self) -> dict[int, Any]:
        """The value of the cell's last expression on each rank, None where it has none; after the cell's end."""
        last_value = ipp.Reference("lambda count: get_ipython().user_ns['Out'].get(count)")
        pulled = {
            rank: self._cluster.ranks[rank].apply_async(last_value, result.result().execution_count)
            for rank, result in self._results.items()
        }
        return collect(pulled)

    @property
    def _ran_s(self) -> float:
        return time.monotonic() - self._started_s

    @cached_property
    def _hangs(self) -> HangWatch:
        """Made for cells that are not over in a moment."""
        return HangWatch(
            self._cluster.lookout(),
            self._results,
            self._cluster.world_size,
            self._cluster.config.notice_after_s,
        )

    @uninterrupted()
    def _refresh(self) -> None:
        self._watch.check()
        if not self._watch.pending() or (now_s := time.monotonic()) < self._refresh_due_s:
            return  # a rank has come back, whose output can wait for the others or is shown at the end
        self._refresh_due_s = now_s + _REFRESH_PERIOD_S
        self._tell_what_was_reloaded()
        self._output.show_new()
        self._questions.check(self._results, self._output.show_above_question)
        self._hangs.check()
        self._notice.show(self._hangs.text)
        self._give_up_on_stuck_ranks()
        late = self._watch.pending()
        if late and self._timeout_s is not None and self._ran_s > self._timeout_s:
            self._stop()
            named = ", ".join(map(str, late))
            raise ClusterError(
                f"rank(s) {named} did not finish within {self._timeout_s:g} s and were interrupted"
            )

    @uninterrupted()
    def _stop(self) -> None:
        """Brings back the ranks that still work, and makes the group good again."""
        self._hangs.ask()
        if self._hangs.text:
            self._last_words = f"until it was stopped: {self._hangs.text}"
        try:
            self._watch.stop()
        except KeyboardInterrupt:
            # A second Stop: the next cell waits for the ranks, and makes the group good.
            self._cluster.leave_behind(self._results)
            raise
        self._output.finish(without=self._watch.pending() + self._watch.gone)
        self._give_up_on_stuck_ranks()
        self._restore_group()

    def _tell_what_was_reloaded(self) -> None:
        for line in self._cluster.reloading.take_messages():
            _tell(line)

    @uninterrupted()
    def _finish(self) -> None:
        self._tell_what_was_reloaded()
        failed, freed = self._watch.outcome()
        self._output.finish(without=self._watch.gone)
        self._restore_group([failure.rank for failure in failed])
        if freed:
            _tell(f"freed from waiting for the others: rank {', '.join(map(str, freed))}")
        if failed:
            raise RankError(failed, self._cluster.world_size)

    def _restore_group(self, failed: Sequence[int] = ()) -> None:
        """Makes the group good again; ranks whose processes ended are replaced."""
        if self._watch.severed or self._watch.gone:
            self._cluster.history.forget_newest(self._results)
        if self._watch.gone:
            _tell(f"{sentence('; '.join(self._cluster.ranks.gone().values()))} Replacing it")
        for line in self._cluster.restore_group(self._watch, self._results, failed):
            _tell(line)

    def _give_up_on_stuck_ranks(self) -> None:
        stuck = self._watch.stuck()
        if stuck:
            self._cluster.leave_behind(self._results)
            self._cluster.history.forget_newest(self._results)
            explanation = self._hangs.not_back(stuck)
            if causes := self._watch.causes():
                self._output.finish(without=[*self._watch.pending(), *self._watch.gone])
                raise RankError(causes, self._cluster.world_size, explanation)
            raise ClusterError(explanation)

    def _close(self) -> None:
        self._output.close()
        self._questions.close()
        self._notice.show(self._last_words)
        if "_hangs" in vars(self):
            self._hangs.close()
        if self._take_button_away is not None:
            self._take_button_away()


def _number() -> int:
    """Of the notebook's cell that is running, as in `In [12]`; 0 where that is not known."""
    shell = get_ipython()
    # It counts the cell when that begins.
    return shell.execution_count - 1 if shell is not None else 0


def _tell(line: str) -> None:
    """Shows a line under the cell."""
    print(line, file=sys.stderr)  # noqa: T201 - the cell's output
