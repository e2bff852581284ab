"""The model of a step against real steps over a real slow link."""

from __future__ import annotations

import pytest
from linked_steps import rows_of
from slow_link import slow_link

pytestmark = [pytest.mark.slow_link, pytest.mark.long]

ROW = {"width": 512, "wait_ms": 4.0, "batch_size": 1, "bucket_mb": 1, "strategy": "ddp"}
NUM_TRIES = 3
OFF = 0.25


def test_a_step_over_a_real_slow_link_is_predicted() -> None:
    """A row that other work has disturbed says nothing, and is tried again."""
    with slow_link(2, 200e6, 1e-3) as link:
        for _ in range(NUM_TRIES):
            (row,) = rows_of(link, [ROW], num_steps=5, budget_s=4.0, quiet_within_s=5.0)
            if not row.is_disturbed:
                break
    assert len(row.times.buckets) == 8
    # The link is slow: most of the exchange is seen, and the computation alone explains little of the step.
    assert row.times.exposed_s > row.times.computing_s
    assert abs(row.error) < OFF, f"{row.times}\nmodelled {row.modelled_s:.3f} s"
    # With no overlap in the model it is off by more.
    assert abs(row.error) < abs(row.no_overlap_s / row.times.step_s - 1)
