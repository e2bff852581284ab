"""A save or a load when a rank dies, at a Stop or on a full disk: the folder has what it had before, and the
variables are as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import launching
import pytest
from rows import moment

import nbgpu
from nbgpu.errors import CellInterrupted

PATIENCE_S = 30
NUM = 10**6


@pytest.fixture
def held(cluster2: nbgpu.Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder with an earlier save, which is still whole at the end of each test."""
    moment().unlink(missing_ok=True)
    folder = tmp_path / "held"
    cluster2.execute(f"value = torch.full(({NUM},), float(rank)); unlucky = None")
    cluster2.save(folder, ["value"])
    yield folder
    assert len(list(folder.glob("data-*"))) == 1
    cluster2.execute("value = None; unlucky = None")
    cluster2.load(folder)
    assert cluster2.execute("print(int(value.sum()))") == {0: "0\n", 1: f"{NUM}\n"}


def test_a_rank_that_dies_while_it_saves(cluster2: nbgpu.Cluster, held: Path) -> None:
    cluster2.execute(f"{faults.when_pickled(1, 'kill')}\nvalue = value + 5")
    with pytest.raises(nbgpu.RankError, match="the process of rank 1 is gone"):
        cluster2.save(held)
    with pytest.raises(nbgpu.ClusterError, match=f"{launching.called(1)} was killed by SIGKILL"):
        cluster2.execute("1")


def test_stop_while_a_rank_saves(
    cluster2: nbgpu.Cluster, held: Path, stop_at_the_fault: Callable[[], threading.Thread]
) -> None:
    cluster2.execute(f"{faults.when_pickled(1, 'sleep')}\nvalue = value + 5")
    pressed = stop_at_the_fault()
    with pytest.raises(CellInterrupted):
        cluster2.save(held)
    pressed.join(PATIENCE_S)
    # The ranks have all that they had, what is half written is gone, and nothing locks the folder.
    assert cluster2.execute("print(int(value.sum()) // 10**6)") == {0: "5\n", 1: "6\n"}


@pytest.mark.one_host("the small disk is one host's")
def test_a_save_that_the_disk_has_no_room_for(
    cluster2: nbgpu.Cluster, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(3 * 2**20)
    cluster2.execute("small, large = rank, torch.zeros(10**6)")
    cluster2.save(disk / "held", ["small"])
    with pytest.raises(nbgpu.RankError, match="cannot be written: No space left on device"):
        cluster2.save(disk / "held")
    cluster2.execute("small = None")
    assert cluster2.load(disk / "held").names == ["small"]
    assert cluster2.execute("print(small)") == {0: "0\n", 1: "1\n"}
    assert sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()) < 2**20


def test_stop_while_a_rank_loads(
    cluster2: nbgpu.Cluster, tmp_path: Path, stop_at_the_fault: Callable[[], threading.Thread]
) -> None:
    slow = f"def rebuilt():\n    {faults.note()}; __import__('time').sleep(600)"
    cluster2.execute(
        f"{slow}\nclass Slow:\n    def __reduce__(self): return rebuilt, ()\nslow, kept = Slow(), 1"
    )
    cluster2.save(tmp_path / "held", ["slow", "kept", "rebuilt", "Slow"])
    cluster2.execute("kept = 2")
    moment().unlink(missing_ok=True)
    pressed = stop_at_the_fault()
    with pytest.raises(CellInterrupted):
        cluster2.load(tmp_path / "held", trust=True)
    pressed.join(PATIENCE_S)
    assert cluster2.execute("print(kept)") == {0: "2\n", 1: "2\n"}
