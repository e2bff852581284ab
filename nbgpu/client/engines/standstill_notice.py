"""A notice under the cell about ranks that are kept from running while the notebook waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from nbgpu.client.engines.reply import Reply
from nbgpu.client.ipykernel.notice import Notice

_CHECK_PERIOD_S = 1.0


class StandstillNotice:
    """Names, under the cell, the ranks that stand still, such as after SIGSTOP, while the notebook waits for
    them. It is a context manager, whose end removes the notice.

    Args:
        standstills: a function that takes ranks, and returns those that stand still, each with the reason.
    """

    def __init__(self, standstills: Callable[[Iterable[int]], Mapping[int, str]]) -> None:
        self._standstills = standstills
        self._notice = Notice()
        self._due_mono_s = time.monotonic() + _CHECK_PERIOD_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._notice.show("")

    def check(self, results: Mapping[int, Reply]) -> None:
        """Update the notice from the ranks that have not answered. Call this as often as you like: it looks
        at the ranks once a second."""
        now_s = time.monotonic()
        if now_s < self._due_mono_s:
            return
        self._due_mono_s = now_s + _CHECK_PERIOD_S
        reasons = self._standstills(rank for rank, result in results.items() if not result.ready())
        self._notice.show("; ".join(f"rank {rank} does not answer: {text}" for rank, text in reasons.items()))
