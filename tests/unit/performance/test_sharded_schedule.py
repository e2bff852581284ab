"""How FSDP's collectives go on beside the computation."""

from __future__ import annotations

import pytest

from nbgpu.performance.schedule import ShardedBlock, fixed_timing, play_sharded

LATENCY_S, BYTES_PER_S = 0.001, 1e6
LINE = fixed_timing(LATENCY_S, BYTES_PER_S)
ONE_S = LATENCY_S + 0.004  # for 4000 bytes
BLOCKS = [ShardedBlock(4000, 0.010)] * 3
FORWARD_S, BACKWARD_S = 0.030, 0.060


def test_nothing_overlaps_on_cpu_ranks() -> None:
    found = play_sharded(BLOCKS, 4000, FORWARD_S, BACKWARD_S, LINE, LINE, overlaps=False)
    # The rest is gathered once, every block twice, and all are scattered.
    assert len(found.sent) == 1 + 3 + 3 + 4
    assert found.exposed_s == pytest.approx(found.busy_s) == pytest.approx(11 * ONE_S)
    assert found.hidden_s == pytest.approx(0)


def test_with_streams_the_first_gather_and_the_last_scatter_are_seen() -> None:
    found = play_sharded(BLOCKS, 0, FORWARD_S, BACKWARD_S, LINE, LINE, overlaps=True)
    assert found.busy_s == pytest.approx(9 * ONE_S)
    # The first block's weights forward, the last one's backward, and the first one's gradients.
    assert found.exposed_s == pytest.approx(3 * ONE_S)
    assert found.sent == tuple(sorted(found.sent)), "one queue"


def test_a_slow_link_is_never_idle_once_it_is_behind() -> None:
    slow = fixed_timing(LATENCY_S, BYTES_PER_S / 100)
    found = play_sharded(BLOCKS, 0, FORWARD_S, BACKWARD_S, slow, slow, overlaps=True)
    idle_s = found.ended_s - found.busy_s
    assert 0 <= idle_s <= FORWARD_S + BACKWARD_S
    assert found.exposed_s > 0.8 * found.busy_s


def test_no_blocks_are_one_part() -> None:
    found = play_sharded([], 4000, FORWARD_S, BACKWARD_S, LINE, LINE, overlaps=True)
    assert len(found.sent) == 2
    assert found.exposed_s == pytest.approx(2 * ONE_S)
