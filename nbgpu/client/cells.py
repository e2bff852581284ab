"""One distributed cell, from the sending to the last line of output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ipyparallel as ipp

from nbgpu.client.cluster import Cluster
from nbgpu.client.outputs import CellOutput
from nbgpu.client.results import collect, failures
from nbgpu.errors import ClusterError, RankError

_REFRESH_PERIOD_S = 0.1
_INTERRUPT_PATIENCE_S = 2.0


class DistributedCell:
    """A cell that runs on the ranks while its output is shown.

    Args:
        cluster: whose ranks.
        code: the cell's text.
        ranks: which of them; None for all.
        timeout_s: after this time the ranks are interrupted; None waits as long as it takes.
    """

    def __init__(
        self, cluster: Cluster, code: str, ranks: Sequence[int] | None, timeout_s: float | None
    ) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self._results = cluster.submit(code, ranks)
        self._output = CellOutput(self._results)

    async def show(self) -> None:
        """Waits for the ranks without blocking the event loop, so that buttons and panels go on working.

        Raises:
            RankError: the cell raised on one rank or more.
            ClusterError: it took longer than the timeout.
            KeyboardInterrupt: the person interrupted it; the ranks were interrupted too.
        """
        loop = asyncio.get_running_loop()
        returned = asyncio.Event()

        def wake(_: ipp.AsyncResult) -> None:
            # The loop is gone if the cell was cancelled before the rank returned.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(returned.set)

        for result in self._results.values():
            result.add_done_callback(wake)
        try:
            while self._pending():
                with suppress(TimeoutError):
                    await asyncio.wait_for(returned.wait(), _REFRESH_PERIOD_S)
                returned.clear()
                self._refresh()
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._interrupt()
            raise
        self._finish()

    def show_blocking(self) -> None:
        """The same for callers that are no coroutine, such as a line magic."""
        try:
            while self._pending():
                self._results[self._pending()[0]].wait(_REFRESH_PERIOD_S)
                self._refresh()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        self._finish()

    def values(self) -> dict[int, Any]:
        """The value of the cell's last expression on each rank, None where it has none; after the cell's end."""
        last_value = ipp.Reference("lambda count: get_ipython().user_ns['Out'].get(count)")
        pulled = {
            rank: self._cluster.apply_async(rank, last_value, result.result().execution_count)
            for rank, result in self._results.items()
        }
        return collect(pulled)

    def _pending(self) -> list[int]:
        return [rank for rank, result in self._results.items() if not result.ready()]

    def _refresh(self) -> None:
        self._output.show_new()
        if self._timeout_s is not None and time.monotonic() - self._started_s > self._timeout_s:
            late = self._pending()
            if late:
                self._interrupt()
                named = ", ".join(map(str, late))
                raise ClusterError(
                    f"rank(s) {named} did not finish within {self._timeout_s:g} s and were interrupted"
                )

    def _interrupt(self) -> None:
        """Interrupts the ranks that still work, and says which of them did not come back."""
        self._cluster.interrupt(self._pending())
        give_up_s = time.monotonic() + _INTERRUPT_PATIENCE_S
        while self._pending() and time.monotonic() < give_up_s:
            time.sleep(0.02)
        self._output.show_new()
        stuck = self._pending()
        if stuck:
            named = ", ".join(map(str, stuck))
            raise ClusterError(
                f"rank(s) {named} did not stop: they wait in C++ code, probably in a collective that another rank "
                "did not join. %nbgpu stop, then %nbgpu start gives new ranks; their variables are lost"
            )

    def _finish(self) -> None:
        self._output.finish()
        failed = failures(self._results)
        if failed:
            raise RankError(failed)
