"""Another number of ranks in a running cluster: no variable is lost, and no process is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leaks
import psutil
import pytest
from kernel import kernel

import nbgpu
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.host import ps, registry

SUM = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"
BOUND_S = 30


@pytest.fixture(scope="module")
def ours() -> Iterator[nbgpu.Cluster]:
    """The module's cluster, whose engines come and go."""
    with (
        nbgpu.Cluster(gpus="none", ranks=2) as cluster,
        leaks.holding_family_of(psutil.Process(cluster.pids[0]).ppid()),
    ):
        yield cluster


@pytest.fixture
def cluster(ours: nbgpu.Cluster) -> nbgpu.Cluster:
    """The module's cluster, with two ranks and no variables of an earlier test."""
    ours.resize(2)
    ours.execute("%reset_selective -f ^(kept|ddp|group|total|optimizer)$")
    ours.parts.state.news.clear()
    return ours


@contextmanager
def beside(**settings: Any) -> Iterator[nbgpu.Cluster]:
    """A cluster of its own for one test."""
    cluster = nbgpu.Cluster(gpus="none", **settings)
    cluster.parts.lifecycle.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def require_works(cluster: nbgpu.Cluster, ranks: int) -> None:
    """The cluster has these ranks, wherever one looks, and their sum is right."""
    assert cluster.execute(SUM) == dict.fromkeys(range(ranks), f"{ranks}\n")
    assert cluster.world_size == len(cluster.devices) == len(cluster.pids) == cluster.config.ranks == ranks
    assert all(psutil.pid_exists(pid) for pid in cluster.pids.values())
    assert cluster.describe().startswith(f"no GPU used: {ranks} CPU rank")
    entry = next(
        e
        for e in registry.entries()
        if isinstance(e, registry.Entry) and e.folder == cluster.parts.state.folder
    )
    assert {rank: process.pid for rank, process in entry.engines.items()} == cluster.pids
    assert len(entry.devices) == entry.config.ranks == ranks


def test_ranks_come_and_go_and_nothing_is_lost(cluster: nbgpu.Cluster) -> None:
    cluster.execute("kept = torch.full((3,), float(rank)); noted = id(kept)")
    before = cluster.pids
    said = cluster.resize(4)
    assert "ranks 2-3 are new and empty; ranks 0-1 kept all variables" in said
    assert cluster.describe() in said
    require_works(cluster, 4)
    assert {rank: cluster.pids[rank] for rank in before} == before
    names = cluster.execute(
        "print(rank, local_rank, world_size, device, dist.get_rank(), dist.get_world_size(), 'kept' in globals())"
    )
    assert names == {rank: f"{rank} {rank} 4 cpu {rank} 4 {rank < 2}\n" for rank in range(4)}
    assert [line.split()[0] for line in cluster.status().splitlines()[2:]] == ["0", "1", "2", "3"]
    assert cluster.execute("print(kept.tolist(), noted == id(kept))", ranks=[0, 1]) == {
        0: "[0.0, 0.0, 0.0] True\n",
        1: "[1.0, 1.0, 1.0] True\n",
    }
    cluster.execute("kept = 7", ranks=[3])
    leaving = [psutil.Process(cluster.pids[rank]) for rank in (1, 2, 3)]
    assert "ranks 1-3 left, and the variables there are gone; rank 0 kept all variables" in cluster.resize(1)
    # Their parent may still have to collect their exit codes.
    assert psutil.wait_procs(leaving, BOUND_S)[1] == []
    require_works(cluster, 1)
    assert cluster.execute("print(kept.tolist(), noted == id(kept))") == {0: "[0.0, 0.0, 0.0] True\n"}
    # A rank that comes with the number of one that left is another one.
    cluster.resize(2)
    require_works(cluster, 2)
    assert cluster.execute("print('kept' in globals())") == {0: "True\n", 1: "False\n"}
    assert "its 2 cells ran again there" in cluster.restart(1, replay=True)


def test_the_present_number_changes_nothing(cluster: nbgpu.Cluster) -> None:
    before = cluster.pids, cluster.ranks.assignment.generation
    assert cluster.resize(2) == "there are 2 ranks already: nothing was changed"
    assert (cluster.pids, cluster.ranks.assignment.generation) == before


def test_a_ddp_object_goes_with_the_ranks_that_stay(cluster: nbgpu.Cluster) -> None:
    cluster.execute("""
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
optimizer.step()
group = dist.new_group([0, 1])
kept = ddp.module.weight.item()
""")
    said = cluster.resize(3)
    assert "ddp, a DistributedDataParallel object that rank 2 does not have" in said
    assert "this belonged to the process group of 2 ranks; make it again for 3. It was: group = " in said
    said = cluster.resize(1)
    assert "ddp" not in said
    same = "print(kept == ddp.module.weight.item(), len(optimizer.state))"
    assert cluster.execute(same) == {0: "True 1\n"}
    # The gradient is no longer the mean of two ranks.
    cluster.execute("optimizer.zero_grad(); ddp(torch.full((1, 1), rank + 1.0)).sum().backward()")
    assert cluster.execute("print(ddp.module.weight.grad.item())") == {0: "1.0\n"}
    cluster.resize(2)
    cluster.execute("from torch.nn.parallel import DistributedDataParallel")
    cluster.execute("ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))")
    cluster.execute("ddp(torch.full((1, 1), rank + 1.0)).sum().backward()")
    assert cluster.execute("print(ddp.module.weight.grad.item())") == {0: "1.5\n", 1: "1.5\n"}
    # The same name is reported each time when it is lacking.
    assert "ddp, a DistributedDataParallel object that rank 2 does not have" in cluster.resize(3)


def test_a_ddp_object_of_all_ranks_is_on_the_smaller_group(cluster: nbgpu.Cluster) -> None:
    cluster.resize(3)
    cluster.execute("""
from torch.nn.parallel import DistributedDataParallel
ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
def summed(_, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
hooked = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
hooked.register_comm_hook(None, summed)
""")
    assert "ddp" not in cluster.resize(2)
    cluster.execute("for each in (ddp, hooked): each(torch.full((1, 1), rank + 1.0)).sum().backward()")
    # The communication hook sums the gradients, and DDP itself takes their mean.
    gradients = "print(ddp.module.weight.grad.item(), hooked.module.weight.grad.item())"
    assert cluster.execute(gradients) == {0: "1.5 3.0\n", 1: "1.5 3.0\n"}


SLOW_TO_FREE = """
import gc, time
def slow(phase, info):
    if phase == "start" and info["generation"] == 2:
        time.sleep(2)
gc.callbacks.append(slow)
"""


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_a_number_that_cannot_be_is_refused(cluster: nbgpu.Cluster, ranks: int) -> None:
    before = cluster.pids
    with pytest.raises(nbgpu.ConfigError, match="ranks"):
        cluster.resize(ranks)
    assert cluster.pids == before
    require_works(cluster, 2)


def test_a_rank_in_a_cell_is_left_alone(cluster: nbgpu.Cluster, tmp_path: Path) -> None:
    refused = tmp_path / "refused"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(refused)!r}).exists():\n    time.sleep(0.01)\nkept = 1"
    cells = cluster.submit(waits, ranks=[1])
    try:
        with pytest.raises(nbgpu.ClusterError, match="rank 1 is still at work"):
            cluster.resize(3)
    finally:
        refused.touch()
    cells[1].get(BOUND_S)
    require_works(cluster, 2)
    assert cluster.pull("kept", rank=1) == 1


def test_memory_that_is_freed_after_a_run_is_waited_for(cluster: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster.execute(SLOW_TO_FREE, ranks=[1])
    settings = {"data": "phantoms", "patch_size": 16, "num_phantoms": 8, "batch_size": 1, "val_every": 0}
    cluster.train("autoencoder", steps=2, threads=1, runs_dir=str(tmp_path), **settings).wait(400)
    cluster.resize(3)
    cluster.execute("gc.callbacks.remove(slow)\ndel slow, gc, time", ranks=[1])
    require_works(cluster, 3)


def test_a_run_keeps_its_ranks(cluster: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {"data": "phantoms", "patch_size": 16, "num_phantoms": 8, "batch_size": 1, "val_every": 0}
    run = cluster.train("autoencoder", steps=100_000, threads=1, runs_dir=str(tmp_path), **settings)
    with pytest.raises(nbgpu.RunError, match="training"):
        cluster.resize(1)
    run.stop()
    run.wait(400)
    cluster.resize(3)
    # The next run has all ranks.
    run = cluster.train("autoencoder", steps=2, threads=1, runs_dir=str(tmp_path), **settings).wait(400)
    assert run.info.world_size == 3


def kill_once(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Kill a rank when the group is about to be formed."""
    form_again = Ranks._form_again
    killed: list[int] = []

    def kill_first(ranks: Ranks) -> list[str]:
        if not killed:
            killed.append(ranks.pids[rank])
            os.kill(killed[0], signal.SIGKILL)
        return form_again(ranks)

    monkeypatch.setattr(Ranks, "_form_again", kill_first)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_meanwhile(
    cluster: nbgpu.Cluster, monkeypatch: pytest.MonkeyPatch, dying: int
) -> None:
    cluster.execute("kept = rank")
    kill_once(monkeypatch, dying)
    with pytest.raises(nbgpu.ClusterError, match=f"rank {dying} was killed by SIGKILL") as told:
        cluster.resize(3)
    assert "The cluster has 2 ranks, as before" in str(told.value)
    assert "%nbgpu resize 3" in str(told.value)
    require_works(cluster, 2)
    there = cluster.execute("print('kept' in globals())")
    assert there == {0: f"{dying != 0}\n", 1: "True\n"}
    cluster.resize(3)
    require_works(cluster, 3)


def test_a_rank_that_dies_while_others_leave(cluster: nbgpu.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.resize(3)
    cluster.execute("kept = rank")
    kill_once(monkeypatch, 1)
    with pytest.raises(nbgpu.ClusterError, match="rank 1 was killed by SIGKILL") as told:
        cluster.resize(2)
    assert "rank 1 was replaced and is empty; ranks 0,2 kept all variables" in str(told.value)
    require_works(cluster, 3)
    assert cluster.pull("kept", rank=2) == 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_interrupt_undoes_it(cluster: nbgpu.Cluster, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    cluster.execute("kept = rank")
    before = cluster.pids
    form_again = Ranks._form_again
    sent: list[int] = []

    def interrupt_first(ranks: Ranks) -> list[str]:
        if not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGINT)
        return form_again(ranks)

    monkeypatch.setattr(Ranks, "_form_again", interrupt_first)
    with pytest.raises(KeyboardInterrupt):
        cluster.resize(ranks)
    assert cluster.pids == before
    assert cluster.parts.state.news[-1].endswith(
        "The cluster has 2 ranks, as before. They kept all variables."
    )
    require_works(cluster, 2)
    assert cluster.pull("kept", ranks="all") == {0: 0, 1: 1}


def test_a_rank_that_dies_while_a_change_is_interrupted_is_named_before_the_next_cell(
    cluster: nbgpu.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    form_again = Ranks._form_again

    def kill_and_interrupt(ranks: Ranks) -> list[str]:
        monkeypatch.setattr(Ranks, "_form_again", form_again)
        dies = psutil.Process(cluster.pids[1])
        dies.kill()
        psutil.wait_procs([dies], BOUND_S)
        signal.raise_signal(signal.SIGINT)
        return form_again(ranks)

    monkeypatch.setattr(Ranks, "_form_again", kill_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.resize(3)
    assert "rank 1 was replaced and is empty; rank 0 kept all variables" in cluster.parts.state.news[-1]
    require_works(cluster, 2)


def test_faults_are_handled_as_before(cluster: nbgpu.Cluster) -> None:
    cluster.resize(3)
    with pytest.raises(nbgpu.RankError, match="rank 2"):
        cluster.execute("if rank == 2: raise ValueError('on purpose')\ndist.barrier()")
    require_works(cluster, 3)
    with pytest.raises(nbgpu.RankError, match="rank 2"):
        cluster.execute(
            "import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
        )
    require_works(cluster, 3)
    assert "rank 2 has a new process" in cluster.restart(2)
    require_works(cluster, 3)
    # Between two cells one has gone that would leave anyway.
    leaves = psutil.Process(cluster.pids[2])
    leaves.kill()
    psutil.wait_procs([leaves], BOUND_S)
    with pytest.raises(nbgpu.ClusterError, match="rank 2 was replaced"):
        cluster.resize(2)
    cluster.resize(2)
    require_works(cluster, 2)


def test_a_spare_is_taken_first_and_threads_and_limits_follow() -> None:
    num_cores = len(os.sched_getaffinity(0))
    with beside(ranks=1, spare=1, memory_limit="0.9", cell_seed=5) as cluster:
        (spare,) = cluster.ranks.assignment.spares.values()
        threads = "import os; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
        assert cluster.execute(threads) == {0: f"{num_cores} {num_cores}\n"}
        limit = cluster.ranks._specs[0]["memory_limit_bytes"]
        cluster.resize(2)
        assert cluster.pids[1] == spare.pid
        assert list(cluster.ranks.assignment.spares.values()) != [spare]
        assert len(cluster.ranks.assignment.spares) == 1
        half = max(1, num_cores // 2)
        assert cluster.execute(threads) == dict.fromkeys(range(2), f"{half} {half}\n")
        data = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
        for said in cluster.execute(data).values():
            assert 0 < int(said) < limit
        drawn = cluster.execute("print(torch.rand(1).item())")
    with beside(ranks=2, cell_seed=5) as other:
        assert other.execute("print(torch.rand(1).item())")[1] == drawn[1]


def test_a_rank_that_has_more_than_its_share_is_named() -> None:
    total_bytes = psutil.virtual_memory().total
    share = 3 * 2**30 / total_bytes
    with beside(ranks=1, memory_limit=f"{share:.6f}") as cluster:
        with pytest.raises(nbgpu.ConfigError, match=r"rank 0 has .* Free memory"):
            cluster.resize(30)
        assert cluster.execute("print(world_size)") == {0: "1\n"}


@pytest.mark.gpu
def test_ranks_on_gpus_come_and_go() -> None:
    with nbgpu.Cluster(gpus="auto", ranks=1) as cluster:
        first = cluster.devices[0]
        cluster.execute("kept = torch.ones(3, device=device)")
        cluster.resize(2)
        assert cluster.devices[0] == first
        total = "total = torch.ones(1, device=device); dist.all_reduce(total); print(int(total))"
        assert cluster.execute(total) == {0: "2\n", 1: "2\n"}
        cluster.resize(1)
        assert cluster.execute("print(int(kept.sum()))") == {0: "3\n"}


def test_in_a_notebook_that_goes_and_another_that_comes() -> None:
    try:
        with kernel() as first:
            done = first.run("import nbgpu\n%load_ext nbgpu\n%nbgpu start --gpus none --ranks 1 --keep")
            assert done.status == "ok", done.error
            assert "say how many ranks" in first.run("%nbgpu resize").stderr
            done = first.run("%nbgpu resize 2")
            assert "rank 1 is new and empty; rank 0 kept all variables" in done.stdout
            assert first.run("%%distributed\nkept = rank + 5").status == "ok"
            assert " 2 " in first.run("%nbgpu ps").stdout
            pid = first.manager.provisioner.pid
            os.killpg(pid, signal.SIGKILL)
        with kernel() as second:
            second.run("import nbgpu\n%load_ext nbgpu")
            assert "2 CPU ranks" in second.run("%nbgpu attach").stdout
            assert second.run("nbgpu.current().pull('kept', ranks='all')").value == "{0: 5, 1: 6}"
            assert second.run("%nbgpu resize 3").status == "ok"
            assert second.run("print(nbgpu.current().execute('print(world_size)'))").stdout.count("3") == 3
            second.run("%nbgpu stop")
    finally:
        ps.stop([], everything=True)
