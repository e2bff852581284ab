"""Real ranks are bound to cores, as those of GPUs at two NUMA nodes. Which cores make a node is pretended."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import nbgpu
from nbgpu.machine import devices, numa

CORES = sorted(os.sched_getaffinity(0))
LOOK = """
import os, subprocess, sys, threading
look = "import os; print(sorted(os.sched_getaffinity(0)))"
thread = threading.Thread(target=exec, args=(look,))
thread.start()
thread.join()
print(subprocess.check_output([sys.executable, "-c", look], text=True), end="")
exec(look)
"""


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first core is one node, with rank 0's device, and the others are another one, with rank 1's."""
    for node, cores in enumerate([CORES[:1], CORES[1:]]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(",".join(map(str, cores)))
    cpu = devices.cpu
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(devices, "cpu", lambda rank: replace(cpu(rank), numa_node=rank))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.usefixtures("two_nodes")
def test_ranks_and_what_they_start_stay_on_their_cores() -> None:
    nodes = CORES[:1], CORES[1:]
    expected = {rank: sorted([str(nodes[rank])] * 3) for rank in range(2)}
    with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        assert looked(cluster) == expected
        assert cluster.execute("print(torch.get_num_threads())")[0] == "1\n"
        cluster.restart(rank=1)
        assert looked(cluster) == expected


@pytest.mark.long
@pytest.mark.usefixtures("two_nodes")
def test_cores_that_the_kernel_was_given_stay() -> None:
    os.sched_setaffinity(0, CORES[:1])
    try:
        with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
            assert looked(cluster) == dict.fromkeys(range(2), [str(CORES[:1])] * 3)
    finally:
        os.sched_setaffinity(0, CORES)


def looked(cluster: nbgpu.Cluster) -> dict[int, list[str]]:
    """The cores of a thread of each rank, of a process that it starts, and its own."""
    return {rank: sorted(text.splitlines()) for rank, text in cluster.execute(LOOK).items()}
