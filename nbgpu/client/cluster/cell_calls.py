"""The calls of a cluster that run code on its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nbgpu.client.cluster.parts import ClusterParts
from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.reply import Reply
from nbgpu.client.faults.watch import RankWatch
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import CellOptions

_OUTPUT_PATIENCE_S = 5.0
"""How long nothing may come of output that is under way."""

_R = TypeVar("_R", bound=Reply)
"""A rank's pending reply."""


class CellCalls(ClusterParts):
    """Sends cells and function calls to the ranks."""

    def submit(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Send a cell to the ranks and return at once.

        Where one of them fails, the others are freed from waiting for it; `stop_cell` stops all. The next
        call forms the process group again.

        Args:
            code: the cell's text.
            ranks: the ranks that run it; None for all.

        Returns:
            By rank, ipyparallel's AsyncResult, which gathers the output.

        Raises:
            RunError: a training run has the ranks now.
        """
        results = self._submit(code, ranks)
        self.recovery.note_submitted(results)
        return results

    def _submit(self, code: str, ranks: Sequence[int] | None) -> dict[int, Any]:
        return self._send(
            code,
            ranks,
            lambda chosen: {
                rank: self.ranks[rank].execute(code, silent=False, block=False) for rank in chosen
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
        """As `submit`, in half the time. `arrivals` gets the output message by message.

        The answers to a cell that `is_awaited` come on the caller's event loop.
        """
        return self._send(
            code,
            ranks,
            lambda chosen: self.ranks.send_cell(chosen, code, options, arrivals, is_awaited),
        )

    @uninterrupted()
    def _send(
        self, code: str, ranks: Sequence[int] | None, send: Callable[[Sequence[int]], Mapping[int, _R]]
    ) -> dict[int, _R]:
        chosen = self._chosen(ranks)
        self._make_ready()
        self._last_seen = {}
        self.reloading.before_cell(self.ranks)
        self.history.note(chosen, code)
        results: dict[int, _R] = {}
        try:
            # A cell that only some ranks got would meet the others' next cell in a collective.
            results |= send(chosen)
            take_interrupt()
        except KeyboardInterrupt:
            self.recovery.stop(RankWatch(self.ranks, results), results)
            self.history.forget_newest(chosen)
            raise
        return results

    @uninterrupted()
    def execute(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Run code on the ranks and return the text that each printed to stdout.

        Raises:
            RankError: the code raised on one rank or more.
        """
        results = self._submit(code, ranks)
        watch = RankWatch(self.ranks, results)
        try:
            self.recovery.bring_back(watch, results)
        finally:
            if watch.severed or watch.gone:
                self.history.forget_newest(results)
            self.note_use()
        for result in results.values():
            # Output comes over another socket than the result, and may come after it.
            length = -1
            while not result.wait_for_output(_OUTPUT_PATIENCE_S) and length < (length := len(result.stdout)):
                pass
        return {rank: result.stdout for rank, result in results.items()}

    @uninterrupted()
    def apply(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call a function on the ranks and return its results by rank; RankError if it raised."""
        chosen = self._chosen(ranks)
        self._make_ready()
        results = {rank: self.ranks[rank].apply_async(function, *args) for rank in chosen}
        self.recovery.bring_back(RankWatch(self.ranks, results), results)
        return {rank: result.result() for rank, result in results.items()}

    def stop_cell(self) -> None:
        """Stop a cell that ranks are still in although nobody waits for it, as the stop button would."""
        self.recovery.stop_cell()
