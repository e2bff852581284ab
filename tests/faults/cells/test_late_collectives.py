"""A collective that outlasts `collective_timeout_s`, with gloo's own timeout out of the way: as over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faults
import pytest
from rows import Measured, row

import nbgpu

TIMEOUT_S = 1.5
FAR_AWAY = (
    "from datetime import timedelta\nfrom nbgpu.engine.group import torch_private\n"
    "torch_private.change_timeout(timedelta(days=1))"
)
TOTAL = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
WELL = {0: "3 0\n", 1: "3 7\n", 2: "3 14\n"}
NUMBER = r"collective \d+ of the default group"
LATE = {
    "all_reduce": (
        f"{faults.note()}\nif rank != 2: dist.all_reduce(torch.ones(3, 4))",
        rf"ranks? [01](, 1)?: CollectiveTimeoutError: all_reduce of \[3, 4\] Float, {NUMBER}, .* 1\.5 s .*: rank 2 had not come",
    ),
    "a rank is cut off by another one": (
        f"""{faults.note()}
from nbgpu.engine.group import collective_timeout
if rank == 1: collective_timeout.allow("0", 60.0)
if rank != 2: dist.all_reduce(torch.ones(3, 4))""",
        rf"^rank 0: CollectiveTimeoutError: all_reduce of \[3, 4\] Float, {NUMBER}, .*: rank 2 had not come",
    ),
    "work that was begun": (
        f"{faults.note()}\nif rank == 0:\n    work = dist.broadcast(torch.ones(2), 1, async_op=True)\n    work.wait()",
        rf"rank 0: CollectiveTimeoutError: broadcast of \[2\] Float, {NUMBER}, .*: ranks 1, 2 had not come",
    ),
    "work that nobody waits for": (
        f"{faults.note()}\nimport time\nif rank == 0:\n    work = dist.barrier(async_op=True)\n    time.sleep(3)",
        rf"rank 0: CollectiveTimeoutError: barrier, {NUMBER}, .*: ranks 1, 2 had not come",
    ),
    "a group of the person's own": (
        f"pair = dist.new_group([0, 1])\n{faults.note()}\nif rank == 1: dist.barrier(group=pair)\ndel pair",
        r"rank 1: CollectiveTimeoutError: barrier, collective 1 of the group '\w+', .*: rank 0 had not come",
    ),
    # What NCCL runs on the GPU ends when it is aborted, and raises nothing. Here that is work of gloo's for
    # which nobody waits, under NCCL's name.
    "work over NCCL, which gloo stands in for": (
        f"""{faults.note()}
import dataclasses, time
if rank == 0:
    in_flight = torch_private.collectives_in_flight
    torch_private.collectives_in_flight = lambda: {{
        key: dataclasses.replace(each, backend="nccl") for key, each in in_flight().items()
    }}
    work = dist.barrier(async_op=True)
    try:
        for _ in range(200): time.sleep(0.1)
    finally:
        torch_private.collectives_in_flight = in_flight
""",
        rf"rank 0: CollectiveTimeoutError: barrier, {NUMBER}, .*: ranks 1, 2 had not come",
    ),
}


@pytest.fixture(scope="module")
def started() -> Iterator[nbgpu.Cluster]:
    with nbgpu.Cluster(gpus="none", ranks=3, collective_timeout_s=TIMEOUT_S) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: nbgpu.Cluster) -> Iterator[nbgpu.Cluster]:
    started.execute(f"kept = 7 * rank\n{FAR_AWAY}")
    pids = dict(started.pids)
    yield started
    assert started.execute(TOTAL) == WELL
    assert started.pids == pids, "a rank was replaced"
    started.parts.state.news.clear()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind != "all_reduce" else kind for kind in LATE]
)
@row(
    "a collective outlasts collective_timeout_s: {kind}",
    "an error names the collective, its number, its shape and the ranks that had not come; the ranks live, and keep their variables",
    bound_s=None,
)
def test_it_comes_back_as_an_error_that_names_it(
    cluster: nbgpu.Cluster, measured: Measured, kind: str
) -> None:
    code, message = LATE[kind]
    with pytest.raises(nbgpu.RankError, match=message) as late:
        cluster.execute(code)
    measured.ended(str(late.value))


@pytest.mark.long
def test_code_that_handles_the_error_goes_on_to_its_end(cluster: nbgpu.Cluster) -> None:
    handled = "if rank == 0:\n    try: dist.barrier()\n    except RuntimeError: kept += 0; handled = True"
    with pytest.raises(nbgpu.RankError, match="rank 0: CollectiveTimeoutError: barrier"):
        cluster.execute(handled)
    assert cluster.execute("print('handled' in globals())", ranks=[0]) == {0: "True\n"}


@pytest.mark.long
@row(
    "a rank of a run does not come to a collective within collective_timeout_s",
    "the run fails with an error that names the collective; the sum is right, variables are kept",
    bound_s=None,
)
def test_a_run_fails_with_it(cluster: nbgpu.Cluster, measured: Measured, tmp_path: Path) -> None:
    cluster.execute(faults.in_training(1, step=3, action="sleep"))
    run = cluster.train("autoencoder", **faults.ENDLESS, runs_dir=str(tmp_path))
    with pytest.raises(
        nbgpu.RankError, match=r"CollectiveTimeoutError: .* of the default group, .*: rank 1 had not come"
    ) as late:
        run.wait(400)
    measured.ended(str(late.value))
    assert run.status == "failed"
