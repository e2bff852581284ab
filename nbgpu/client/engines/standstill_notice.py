"""Names, under the cell, the ranks that stand still while the notebook waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from nbgpu.client.engines.reply import Reply
from nbgpu.client.ipykernel.notice import Notice

_STANDSTILL_WORTH_SAYING_S = 1.0


class StandstillNotice:
    """A notice under the cell that names the ranks which stand still while the notebook waits for them.

    It is a context manager, whose end removes the notice.

    Args:
        standstills: a function that returns those of some ranks that stand still, and why.
    """

    def __init__(self, standstills: Callable[[Iterable[int]], Mapping[int, str]]) -> None:
        self._standstills = standstills
        self._notice = Notice()
        self._due_mono_s = time.monotonic() + _STANDSTILL_WORTH_SAYING_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._notice.show("")

    def check(self, results: Mapping[int, Reply]) -> None:
        """Look at the ranks that have not answered; this costs nothing if it was just done."""
        now_s = time.monotonic()
        if now_s < self._due_mono_s:
            return
        self._due_mono_s = now_s + _STANDSTILL_WORTH_SAYING_S
        standing = self._standstills(rank for rank, result in results.items() if not result.ready())
        self._notice.show("; ".join(f"rank {rank} does not answer: {why}" for rank, why in standing.items()))
