"""A value on its way when a rank dies, fails, or when the person presses Stop: nothing is left, and the next
one comes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import launching
import pytest
import torch
from rows import moment

import nbgpu
from nbgpu.errors import CellInterrupted

PATIENCE_S = 30


@pytest.fixture(autouse=True)
def nothing_is_left(cluster2: nbgpu.Cluster) -> Iterator[None]:
    moment().unlink(missing_ok=True)
    yield
    cluster2.execute("kept = torch.full((10**6,), float(rank))")
    pulled = cluster2.pull("kept", ranks="all")
    assert {rank: float(value.mean()) for rank, value in pulled.items()} == {0: 0.0, 1: 1.0}
    cluster2.push(kept=pulled[1])
    assert cluster2.execute("print(int(kept.sum()))") == {0: "1000000\n", 1: "1000000\n"}
    del pulled
    cluster2.execute("del kept")
    for pid in (os.getpid(), *cluster2.ranks.pids_here.values()):
        assert not open_memory(pid)
        assert "memfd:nbgpu" not in Path(f"/proc/{pid}/maps").read_text()


def open_memory(pid: int) -> list[Path]:
    """What shared memory a process has open."""
    descriptors = (path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    return [path for path in descriptors if "memfd:nbgpu" in str(path)]


def test_a_rank_that_dies_while_it_sends(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute(faults.when_pickled(1, "kill"))
    with pytest.raises(nbgpu.RankError, match="the process of rank 1 is gone"):
        cluster2.pull("unlucky", ranks="all")
    with pytest.raises(nbgpu.ClusterError, match=f"{launching.called(1)} was killed by SIGKILL"):
        cluster2.execute("1")


def test_a_rank_that_dies_while_it_receives(cluster2: nbgpu.Cluster) -> None:
    with pytest.raises(nbgpu.RankError, match="the process of rank 0 is gone"):
        cluster2.push([0], x=[torch.zeros(10**6), faults.WhenUnpickled("kill")])
    with pytest.raises(nbgpu.ClusterError, match=f"{launching.called(0)} was killed by SIGKILL"):
        cluster2.execute("1")


def test_what_fails_on_a_rank_is_told_and_sets_no_variable(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute(faults.when_pickled(1, "raise"))
    with pytest.raises(nbgpu.RankError, match=r"rank 1: TransferError: unlucky\[1\]: Unlucky .* on purpose"):
        cluster2.pull("unlucky", ranks="all")
    with pytest.raises(nbgpu.RankError, match="x, y: cannot be put together here: ValueError: on purpose"):
        cluster2.push(x=torch.zeros(10**6), y=faults.WhenUnpickled("raise"))
    assert cluster2.execute("print('x' in globals())") == {0: "False\n", 1: "False\n"}


def test_stop_while_a_rank_sends(
    cluster2: nbgpu.Cluster, stop_at_the_fault: Callable[[], threading.Thread]
) -> None:
    cluster2.execute(faults.when_pickled(1, "sleep"))
    pressed = stop_at_the_fault()
    with pytest.raises(CellInterrupted):
        cluster2.pull("unlucky", ranks="all")
    pressed.join(PATIENCE_S)


def test_stop_while_a_rank_receives(
    cluster2: nbgpu.Cluster, stop_at_the_fault: Callable[[], threading.Thread]
) -> None:
    pressed = stop_at_the_fault()
    with pytest.raises(CellInterrupted):
        cluster2.push(x=[torch.zeros(10**6), faults.WhenUnpickled("sleep")])
    pressed.join(PATIENCE_S)
    assert cluster2.execute("print('x' in globals())") == {0: "False\n", 1: "False\n"}


def test_stop_while_a_transfer_is_sent(
    cluster2: nbgpu.Cluster,
    monkeypatch: pytest.MonkeyPatch,
    stop_at_the_fault: Callable[[], threading.Thread],
) -> None:
    """The first rank is at work on it before the last one has it."""
    call = cluster2.ranks.call

    def slow_call(*arguments: Any, **options: Any) -> dict[int, Any]:
        sent = call(*arguments, **options)
        pressed.join(PATIENCE_S)
        return sent

    pressed = stop_at_the_fault()
    monkeypatch.setattr(cluster2.ranks, "call", slow_call)
    with pytest.raises(CellInterrupted):
        cluster2.push(x=[torch.zeros(10**6), faults.WhenUnpickled("sleep")])
    monkeypatch.undo()
    assert cluster2.execute("print('x' in globals())") == {0: "False\n", 1: "False\n"}
