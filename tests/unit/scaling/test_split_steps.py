"""The parts of the steps of all ranks, from their records."""

from __future__ import annotations

import pandas as pd
import pytest

from nbgpu.protocol.records import Event, Sample
from nbgpu.scaling.step_parts import StepParts


def step(rank: int, number: int, ready_at_s: float, exposed_s: float, **more: float) -> Sample:
    values = {
        "step_s": 1.0,
        "data_s": 0.1,
        "forward_s": 0.2,
        "backward_s": 0.3,
        "optimizer_s": 0.05,
        "exchange_s": exposed_s + 0.1,
        "hidden_s": 0.1,
        "exposed_s": exposed_s,
        "begun_at_s": 100.0 * number,
        "ready_at_s": 100.0 * number + ready_at_s,
    }
    return Sample(rank, 0, 0.0, number, values | more)


def two_ranks(num_steps: int, late: int = 1) -> list[Sample | Event]:
    """Rank `late` has its gradients 0.15 s after the other one; the transfer then takes 0.05 s."""
    return [
        step(rank, number, 0.7 if rank == late else 0.55, 0.05 if rank == late else 0.2)
        for number in range(1, num_steps + 1)
        for rank in (0, 1)
    ]


def test_the_exchange_is_waiting_for_the_last_rank_and_then_transfer() -> None:
    found = StepParts(two_ranks(3), 2).frame()
    assert list(found["step"]) == [1, 1, 2, 2, 3, 3]
    assert list(found["waited_for"]) == [1] * 6
    first, last = found.iloc[0], found.iloc[1]
    assert (first["waiting_s"], first["transfer_s"]) == pytest.approx((0.15, 0.05))
    assert (last["waiting_s"], last["transfer_s"]) == pytest.approx((0.0, 0.05))
    parts = ["data_s", "forward_s", "backward_s", "exposed_s", "optimizer_s", "other_s"]
    assert list(found[parts].sum(axis=1)) == pytest.approx([1.0] * 6)


def test_the_slowest_rank_is_named_with_its_share_of_the_steps() -> None:
    records = two_ranks(3) + [r for r in two_ranks(4, late=0) if r.step == 4]
    found = StepParts(records, 2)
    assert (found.slowest_rank, found.share_of_slowest) == (1, 0.75)
    assert found.medians_s()["step_s"] == 1.0
    assert found.medians_s(0)["waiting_s"] == pytest.approx(0.15)
    assert "rank 1 was the last one in 75% of 4 steps" in str(found)
    assert "waiting for the last rank" in str(found)


def test_a_repeated_step_counts_as_it_was_done_last() -> None:
    found = StepParts([*two_ranks(1), step(0, 1, 9.0, 0.01, step_s=2.0), step(1, 1, 9.2, 0.0)], 2).frame()
    assert list(found["step_s"]) == [2.0, 1.0]
    assert len(found) == 2


def test_nothing_is_waited_for_where_a_rank_lacks_the_step() -> None:
    found = StepParts([*two_ranks(1), step(0, 2, 0.5, 0.3)], 2).frame()
    assert found["waited_for"].isna().tolist() == [False, False, True]
    assert found["waiting_s"].isna().tolist() == [False, False, True]
    assert found["exposed_s"].notna().all()


def test_the_clocks_of_other_hosts_are_moved() -> None:
    records = [step(0, 1, 0.55, 0.2), step(1, 1, 5000.7, 0.05)]
    moved = {"offsets_s": [0.0, -5000.0], "errors_s": [0.0, 1e-5], "at_s": 100.0}
    found = StepParts([Event(0, 0, 0.0, 0, "clocks", "", moved), *records], 2).frame()
    assert list(found["waiting_s"]) == pytest.approx([0.15, 0.0])


def test_without_an_exchange_its_columns_are_missing() -> None:
    values = {"step_s": 1.0, "data_s": 0.1, "forward_s": 0.3, "backward_s": 0.5, "optimizer_s": 0.05}
    found = StepParts([Sample(0, 0, 0.0, 1, values | {"begun_at_s": 3.0})], 1)
    table = found.frame()
    assert not {"exchange_s", "exposed_s", "waiting_s", "begun_at_s"} & set(table.columns)
    assert table["other_s"][0] == pytest.approx(0.05)
    assert found.slowest_rank is None
    assert "exchange" not in str(found)


def test_records_without_parts_give_an_empty_table() -> None:
    found = StepParts([Sample(0, 0, 0.0, 1, {"step_s": 1.0, "loss": 1.0})], 1)
    assert isinstance(found.frame(), pd.DataFrame)
    assert found.frame().empty
    assert found.medians_s() == {}
    assert str(found) == "no step was recorded with its parts"
