"""What is different with NCCL: it is freed by an abort, and torch's watchdog must leave the process alone.

Written without a GPU at hand; docs/faults.md says whether it was ever run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import faults
import pytest
import torch
from kernel import Kernel, kernel
from rows import Measured, row

import nbgpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, two at least"),
]
BOUND_S = 30
SUM = "total = torch.ones(1, device=device)\ndist.all_reduce(total)\n"


@pytest.fixture
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        started.run("%load_ext nbgpu")
        assert started.run("%nbgpu start --gpus 0,1").status == "ok"
        yield started
        started.run("%nbgpu stop")


@row(
    "one rank raises, the others wait in NCCL's all_reduce",
    "all are back, the sum is right, variables are kept",
    1,
    "GPU, NCCL",
)
def test_one_rank_raises_while_the_others_wait(notebook: Kernel, measured: Measured) -> None:
    notebook.run("%%distributed\nkept = torch.full((4,), float(rank), device=device)")
    code = f"{faults.at(1, 'raise')}\nx = torch.ones(1000, device=device)\ndist.all_reduce(x)\ntorch.cuda.synchronize()"
    done = notebook.run(f"%%distributed\n{code}", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.error.startswith("on rank 1:")
    done = notebook.run(f"%%distributed\n{SUM}int(total), kept.tolist() == [rank] * 4", timeout_s=BOUND_S)
    assert done.said(0, 1) == [["(2, True)"], ["(2, True)"]]


@row("Stop in NCCL's all_reduce that never completes", "the ranks are back, the sum is right", 1, "GPU, NCCL")
def test_stop(notebook: Kernel, measured: Measured) -> None:
    def stop() -> None:
        measured.fault_now()
        notebook.manager.interrupt_kernel()

    code = "print('working', flush=True)\nx = torch.ones(9, device=device)\nif rank == 0:\n    dist.all_reduce(x); x.cpu()"
    done = notebook.run(f"%%distributed\n{code}", meanwhile=stop, timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.status == "error"
    done = notebook.run(f"%%distributed\n{SUM}int(total)", timeout_s=BOUND_S)
    assert done.said(0, 1) == [["2"], ["2"]]


def test_the_flight_recorder_of_a_failed_run_is_in_its_folder(tmp_path: Path) -> None:
    with nbgpu.Cluster(gpus="0,1") as cluster:
        cluster.execute(faults.in_training(1, step=4, action="raise"))
        run = cluster.train(
            "autoencoder", data="phantoms", patch_size=16, num_phantoms=16, steps=100, runs_dir=str(tmp_path)
        )
        with pytest.raises(nbgpu.RankError):
            run.wait(400)
        for rank in (0, 1):
            told = json.loads((run.folder / f"flight-rank{rank}.json").read_text())
            assert any("nccl" in entry["profiling_name"] for entry in told["entries"])
