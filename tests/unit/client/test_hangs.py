"""What is said of ranks that wait for each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.faults.hangs import HangWatch, RankActivity, notice
from nbgpu.protocol.records import MainThreadState


def _waits(collective: str, line: int, for_s: float) -> RankActivity:
    return RankActivity(MainThreadState("cell", line=line, source="...", collective=collective), for_s)


def _works(line: int, source: str) -> RankActivity:
    return RankActivity(MainThreadState("cell", line=line, source=source), 100)


def _result(for_s: float) -> RankActivity:
    return RankActivity(
        MainThreadState("run", step=9, within="result, recipe.py line 3", busy_with="working out the result"),
        for_s,
    )


FINISHED = RankActivity(instead="has finished the cell")


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            [_waits("all_reduce", 4, 7.2), FINISHED],
            "rank 0 waits in all_reduce, cell line 4, for 7 s; rank 1 has finished the cell",
        ),
        (
            [_waits("all_reduce", 4, 9), _works(2, "load()"), _waits("all_reduce", 4, 7), _works(2, "load()")],
            "ranks 0, 2 wait in all_reduce, cell line 4, for 7 s; ranks 1, 3 are at cell line 2: load()",
        ),
        (
            [_waits("all_reduce", 4, 7), _waits("broadcast", 6, 2)],
            "rank 0 waits in all_reduce, cell line 4, for 7 s; "
            "rank 1 waits in broadcast, cell line 6, for 2 s: they wait for each other",
        ),
        (
            [_waits("barrier", 1, 7), _waits("barrier", 1, 8), FINISHED, FINISHED],
            "ranks 0, 1 wait in barrier, cell line 1, for 7 s; ranks 2, 3 have finished the cell",
        ),
        (
            [_waits("DDP backward", 3, 7), FINISHED],
            "rank 0 waits in DDP backward, cell line 3, for 7 s; rank 1 has finished the cell. "
            "If the ranks have unequal numbers of batches, write the loop below `with model.join():`",
        ),
        (
            [_waits("DDP backward", 3, 7), _works(2, "load()")],
            "rank 0 waits in DDP backward, cell line 3, for 7 s; rank 1 is at cell line 2: load()",
        ),
        ([_waits("barrier", 1, 7), _waits("barrier", 1, 8)], "all ranks wait in barrier, cell line 1, for 7 s"),
        ([_waits("barrier", 1, 7), _waits("barrier", 1, 1)], ""),
        ([_waits("barrier", 1, 7)], "rank 0 waits in barrier, cell line 1, for 7 s"),
        ([_waits("barrier", 1, 7), RankActivity()], "rank 0 waits in barrier, cell line 1, for 7 s; rank 1 has not answered yet"),
        (
            [_waits("barrier", 1, 7), RankActivity(MainThreadState("idle"), 7)],
            "rank 0 waits in barrier, cell line 1, for 7 s; rank 1 is idle",
        ),
        (
            [_waits("barrier", 1, 7), RankActivity(MainThreadState("call"), 7)],
            "rank 0 waits in barrier, cell line 1, for 7 s; rank 1 is busy",
        ),
        (
            [_result(8), _waits("barrier", 1, 70)],
            "rank 0 is working out the result, in result, recipe.py line 3, with no progress for 8 s; "
            "rank 1 waits in barrier, cell line 1, for 70 s",
        ),
        ([_waits("barrier", 1, 4), FINISHED], ""),
        ([_works(2, "load()"), FINISHED], ""),
        ([RankActivity(instead="does not answer for 9 s"), FINISHED], ""),
    ],
)  # fmt: skip
def test_who_waits_where_and_who_does_not(places: list[RankActivity], said: str) -> None:
    assert notice(dict(enumerate(places)), after_s=5) == said


@pytest.mark.parametrize("slow", [_result(1), _works(2, "load()"), RankActivity(MainThreadState("call"), 70)])
def test_waiting_for_a_rank_that_was_busy_just_now_is_no_hang(slow: RankActivity) -> None:
    places = {0: _waits("barrier", 1, 70), 1: slow}
    assert not notice(places, after_s=5, since_busy_s=0)
    assert not notice(places, after_s=5, since_busy_s=4.9)
    assert notice(places, after_s=5, since_busy_s=5).startswith(
        "rank 0 waits in barrier, cell line 1, for 70 s"
    )


@pytest.mark.parametrize(
    ("where", "place"),
    [
        (MainThreadState("idle"), ""),
        (MainThreadState("cell", line=4), "cell line 4"),
        (MainThreadState("cell", line=4, within="fit, model.py line 30"), "fit, model.py line 30, called at cell line 4"),
        (MainThreadState("call", within="fit, model.py line 30"), "fit, model.py line 30"),
        (MainThreadState("run", step=11, within="loss, unet.py line 3"), "loss, unet.py line 3, in step 12"),
    ],
)  # fmt: skip
def test_a_place_in_words(where: MainThreadState, place: str) -> None:
    assert where.place == place


def test_a_rank_that_raised_has_not_finished() -> None:
    """As where a host is lost, and the others are freed before it is known to be gone."""
    sampler: Any = SimpleNamespace(seen={})
    back: list[Any] = [
        SimpleNamespace(ready=lambda: True, exception=lambda raised=raised: raised)
        for raised in (None, RuntimeError("Connection reset by peer"))
    ]
    watch = HangWatch(sampler, dict(enumerate(back)), 2, notice_after_s=5, work="run")
    assert watch.describe_all() == "rank 0 has finished the run; rank 1 has ended with an error"
