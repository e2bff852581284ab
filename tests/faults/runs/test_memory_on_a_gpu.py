"""A GPU that has no more memory, in a cell and in a run, and a rank's share of it.

Clusters of CPU ranks that other tests keep for a whole module would be in the way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import nbgpu
from nbgpu.client.cells.cell import DistributedCell

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 6,
    "val_every": 0,
}


def failure_in_cell(cluster: nbgpu.Cluster, code: str) -> nbgpu.RankError:
    with pytest.raises(nbgpu.RankError) as caught:
        DistributedCell(cluster, code, None, None).show_blocking()
    return caught.value


def test_a_gpu_in_a_cell_and_in_a_run(tmp_path: Path) -> None:
    """On one GPU, which is there: half of it is taken, and the other half asked for twice."""
    with nbgpu.Cluster(gpus="0") as cluster:
        cluster.execute(
            "half = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device=device)"
        )
        error = failure_in_cell(
            cluster, "def ask():\n    first = half[: len(half) // 2].clone()\n    return half.clone()\nask()"
        )
        message = error.failures[0].message
        assert error.failures[0].error_type == "OutOfMemoryError"
        assert "allocated" in message
        assert "reserved; cuda:0 has" in message
        assert "half: " in message
        assert "first in ask(): " in message
        # The cache was freed: what is reserved is the variable, and little else.
        reserved = cluster.execute("print(torch.cuda.memory_reserved() - len(half) < 64 * 2**20)")
        assert reserved == {0: "True\n"}
        settings = {**SETTINGS, "patch_size": 128, "num_phantoms": 4, "runs_dir": str(tmp_path)}
        run = cluster.train("autoencoder", **{**settings, "batch_size": 1024})
        with pytest.raises(nbgpu.RankError, match="would have fitted: batch_size=") as caught:
            run.wait(250)
        fits = re.search(r"would have fitted: batch_size=(\d+)", str(caught.value))
        assert fits is not None
        smaller = {**settings, "batch_size": max(1, int(fits[1]) // 2), "steps": 2}
        assert cluster.train("autoencoder", **smaller).wait(250).status == "finished"


def test_torch_refuses_on_a_gpu() -> None:
    with nbgpu.Cluster(gpus="0", memory_limit="1GiB") as cluster:
        cluster.execute("kept = torch.ones(2**27, device=device)")
        with pytest.raises(nbgpu.RankError, match="OutOfMemoryError: rank 0 ran out of memory"):
            cluster.execute("more = torch.ones(2**27, device=device)")
