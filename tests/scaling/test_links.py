"""The measurement of the links between real ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import nbgpu
from nbgpu.client.scaling import measurements as client_links

OPERATIONS = ["all_reduce", "two all_reduce at once", "all_gather", "reduce_scatter", "send"]
SUM = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"
HANG_S = 300


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_links, "BUDGET_S", 1.0)


@contextmanager
def beside(ranks: int) -> Iterator[nbgpu.Cluster]:
    """A cluster beside the module's own."""
    cluster = nbgpu.Cluster(gpus="none", ranks=ranks)
    cluster.parts.lifecycle.start()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.usefixtures("briefly")
def test_all_operations_are_timed_and_right(cluster2: Any) -> None:
    cluster2.execute("kept = torch.ones(3)\ntorch.set_default_dtype(torch.float64)")
    begun_s = time.monotonic()
    found = nbgpu.measure_links()
    assert time.monotonic() - begun_s < HANG_S
    assert list(dict.fromkeys(t.operation for t in found.timed)) == OPERATIONS
    assert found.lacking == {}
    for timed in found.timed:
        assert timed.num_wrong == 0
        assert timed.num_samples >= 6
        assert 0 < timed.least_s <= timed.median_s
        assert timed.between_s[0] <= timed.median_s <= timed.between_s[1]
    for operation in OPERATIONS:
        assert found.of(operation).bytes_per_s > 0
    rows = found.frame()
    assert rows["bytes"].min() == 1024
    assert list(rows["count"] * 4) == list(rows["bytes"])
    assert "2 ranks over gloo" in str(found)
    default_again = "print(kept.dtype, torch.ones(1).dtype); torch.set_default_dtype(torch.float32)"
    assert set(cluster2.execute(default_again).values()) == {"torch.float32 torch.float64\n"}


@pytest.mark.usefixtures("briefly")
def test_each_pair_is_timed() -> None:
    with beside(3) as cluster:
        found = nbgpu.measure_links(cluster)
        assert [t.ranks for t in found.timed if t.operation == "send" and t.num_bytes == 1024] == [
            (0, 1),
            (0, 2),
            (1, 2),
        ]
        assert all(t.num_wrong == 0 for t in found.timed)
        assert "send 0 to 2 and back, one way" in str(found)


def test_one_rank_is_refused() -> None:
    with beside(1) as cluster, pytest.raises(nbgpu.ConfigError, match="one rank has no links"):
        nbgpu.measure_links(cluster)


def test_without_a_cluster_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbgpu.client.cluster.cluster._current", None)
    with pytest.raises(nbgpu.NoClusterError, match="%nbgpu start"):
        nbgpu.measure_links()


def test_a_rank_that_dies_meanwhile_is_named_and_replaced() -> None:
    with beside(2) as cluster:
        cluster.execute("kept = rank")
        kill = threading.Timer(1.0, os.kill, (cluster.pids[1], signal.SIGKILL))
        kill.start()
        with pytest.raises(nbgpu.RankError, match="rank 1"):
            nbgpu.measure_links(cluster)
        kill.join()
        assert cluster.execute(SUM) == {0: "2\n", 1: "2\n"}
        assert cluster.execute("print(kept)", ranks=[0]) == {0: "0\n"}
