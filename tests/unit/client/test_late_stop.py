"""A Stop that is noted before a cell is shown, and whose ranks may have finished by then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.cells.cell import DistributedCell
from nbgpu.client.engines.cell_replies import Arrivals
from nbgpu.errors import CellInterrupted


class Reply:
    """The answer of a rank, which comes by itself or once the rank is interrupted."""

    is_here = False

    def ready(self) -> bool:
        return self.is_here

    def exception(self) -> None:
        return None

    def add_done_callback(self, tell: Callable[[Any], object]) -> None:
        self.tell = tell

    def come(self) -> None:
        self.is_here = True
        self.tell(self)


class Ranks:
    """One rank, which is healthy."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.was_severed = False

    def interrupt(self, ranks: list[int]) -> None:
        self.reply.is_here = self.reply.is_here or bool(ranks)

    def sever(self) -> None:
        self.was_severed = True

    def core_uses(self, _: Any) -> dict[int, Any]:
        return {}

    def gone(self) -> dict[int, str]:
        return {}

    def without_group(self) -> list[int]:
        return []

    def how_ended(self, _: int) -> None:
        return None

    def require_reachable(self) -> None:
        pass


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(Reply())


@pytest.fixture
def cell(ranks: Ranks) -> DistributedCell:
    """A cell on one rank, all of whose output is here."""
    state: Any = SimpleNamespace(
        config=SimpleNamespace(max_output_lines=10, notice_after_s=5.0),
        listen=lambda: (),
        world_size=1,
        ranks=ranks,
        tell_news=lambda: None,
        history=SimpleNamespace(forget_newest=lambda _: None),
    )

    def send_cell(_code: str, _ranks: Any, _options: Any, arrivals: Arrivals, _is_awaited: bool) -> Any:
        arrivals._ended.add(0)
        return {0: ranks.reply}

    runner: Any = SimpleNamespace(
        state=state,
        send_cell=send_cell,
        reloading=SimpleNamespace(take_messages=list),
        recovery=SimpleNamespace(restore_group=lambda *_: [], abandon_cell=lambda _: None),
    )
    return DistributedCell(runner, "x = 1", None, None, number=1)


async def _show(cell: DistributedCell, meanwhile: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(meanwhile)
    await cell.show()


def test_a_cell_that_finishes_before_the_stop_takes_effect_is_not_interrupted(
    cell: DistributedCell, ranks: Ranks
) -> None:
    cell.note_stop()
    asyncio.run(_show(cell, ranks.reply.come))
    assert not ranks.was_severed


def test_a_cell_that_still_runs_is_stopped(
    cell: DistributedCell, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DistributedCell, "_hangs", SimpleNamespace(ask=lambda: None, text="", close=lambda: None)
    )
    cell.note_stop()
    with pytest.raises(CellInterrupted):
        asyncio.run(_show(cell, lambda: None))
    assert ranks.was_severed
