"""The part of a cluster that runs code on its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.reply import Reply
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.runs.manager import RunManager
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.variables.autoreload import Reloading
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import CellOptions

_OUTPUT_PATIENCE_S = 5.0
"""The longest time without more output while the last output of a rank is still missing."""

_R = TypeVar("_R", bound=Reply)
"""A rank's pending reply."""


class CellRunner:
    """Sends cells and function calls to the ranks."""

    def __init__(self, state: ClusterState, recovery: Recovery, runs: RunManager) -> None:
        self.state = state
        self.recovery = recovery
        self.reloading = Reloading()
        self._runs = runs

    def submit(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Send a cell to the ranks and return ipyparallel's AsyncResult by rank at once. If a rank fails
        later, the recovery frees the others."""
        results = self._submit(code, ranks)
        self.recovery.note_submitted(results)
        return results

    def _submit(self, code: str, ranks: Sequence[int] | None) -> dict[int, Any]:
        """Send a cell through ipyparallel's own `execute`, whose result gathers the output."""
        return self._send(
            code,
            ranks,
            lambda chosen: {
                rank: self.state.ranks[rank].execute(code, silent=False, block=False) for rank in chosen
            },
        )

    def send_cell(
        self,
        code: str,
        ranks: Sequence[int] | None,
        options: CellOptions,
        arrivals: Arrivals,
        is_awaited: bool = False,
    ) -> dict[int, Answer]:
        """Send a cell to the ranks and return each rank's pending reply. This takes half the time of
        ipyparallel's `execute`, which `submit` uses.

        Args:
            code: the cell's text.
            ranks: the ranks that run it; None for all.
            options: what each rank has to know about the cell.
            arrivals: receives the output, message by message.
            is_awaited: whether the replies are to come on the caller's event loop.
        """
        return self._send(
            code,
            ranks,
            lambda chosen: self.state.ranks.send_cell(chosen, code, options, arrivals, is_awaited),
        )

    @uninterrupted()
    def _send(
        self, code: str, ranks: Sequence[int] | None, send: Callable[[Sequence[int]], Mapping[int, _R]]
    ) -> dict[int, _R]:
        """Prepare the ranks, send code to all that are chosen or to none, and return their pending replies.

        Args:
            code: the code, which is kept in the history.
            ranks: the ranks; None for all.
            send: sends the code to ranks, by their numbers.
        """
        chosen = self.state.checked_ranks(ranks)
        self._runs.make_ready()
        self.state.last_seen = {}
        self.reloading.before_cell(self.state.ranks)
        self.state.history.note(chosen, code)
        results: dict[int, _R] = {}
        try:
            # If only some ranks got the cell, its collectives would meet those of the others' next cell.
            results |= send(chosen)
            take_interrupt()
        except KeyboardInterrupt:
            self.recovery.stop(RankWatch(self.state.ranks, results), results)
            self.state.history.forget_newest(chosen)
            raise
        return results

    @uninterrupted()
    def execute(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Run code on the ranks, wait for all of them, and return what each wrote to stdout. If one fails,
        the others are freed and the group is restored before the RankError is raised."""
        results = self._submit(code, ranks)
        watch = RankWatch(self.state.ranks, results)
        try:
            self.recovery.bring_back(watch, results)
        finally:
            if watch.severed or watch.gone:
                self.state.history.forget_newest(results)
            self.state.note_use()
        for result in results.values():
            # Output comes over another socket than the result, and may come after it. Wait for it as long as
            # each period brings more text.
            length = -1
            while not result.wait_for_output(_OUTPUT_PATIENCE_S) and len(result.stdout) > length:
                length = len(result.stdout)
        return {rank: result.stdout for rank, result in results.items()}

    @uninterrupted()
    def apply(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call a function on the ranks, wait for all of them, and return its values by rank. If one fails,
        the others are freed and the group is restored before the RankError is raised."""
        chosen = self.state.checked_ranks(ranks)
        self._runs.make_ready()
        results = {rank: self.state.ranks[rank].apply_async(function, *args) for rank in chosen}
        self.recovery.bring_back(RankWatch(self.state.ranks, results), results)
        return {rank: result.result() for rank, result in results.items()}
