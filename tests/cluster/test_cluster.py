"""Real engines: they form a group, run code, say what went wrong, and leave nothing behind."""

from __future__ import annotations

import ipyparallel as ipp
import launching
import psutil
import pytest

import nbgpu


def test_every_rank_has_the_promised_names(cluster2: nbgpu.Cluster) -> None:
    printed = cluster2.execute(
        "print(rank, local_rank, world_size, device, torch.ones(1).sum().item(), dist.get_rank())"
    )
    assert printed == {0: "0 0 2 cpu 1.0 0\n", 1: f"1 {launching.local_rank(1)} 2 cpu 1.0 1\n"}


def test_state_stays_on_the_ranks_and_ranks_can_be_chosen(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute("kept = rank + 10")
    cluster2.execute("kept += 100", ranks=[1])
    assert cluster2.execute("print(kept)") == {0: "10\n", 1: "111\n"}
    with pytest.raises(nbgpu.ConfigError, match=r"\[2\].*0 to 1"):
        cluster2.execute("1", ranks=[2])


def test_an_error_has_the_ranks_own_traceback(cluster2: nbgpu.Cluster) -> None:
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.execute("def broken():\n    raise ValueError('on purpose')\nif rank == 1:\n    broken()")
    (failure,) = caught.value.failures
    assert (failure.rank, failure.error_type, failure.message) == (1, "ValueError", "on purpose")
    shown = "\n".join(caught.value._render_traceback_())
    assert "on rank 1" in shown
    assert "broken" in shown
    assert "ipyparallel" not in shown


def test_the_same_error_on_all_ranks_is_told_once(cluster2: nbgpu.Cluster) -> None:
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.execute("1 / 0")
    shown = "\n".join(caught.value._render_traceback_())
    assert shown.startswith("on all ranks:")
    assert shown.count("division by zero") == 1


def test_values_travel_both_ways(cluster2: nbgpu.Cluster) -> None:
    cluster2.push(given={"a": [1, 2]})
    cluster2.execute("given['rank'] = rank")
    assert cluster2.pull("given", rank=1) == {"a": [1, 2], "rank": 1}
    assert cluster2.apply(max, 3, 4) == {0: 4, 1: 4}
    with pytest.raises(nbgpu.RankError, match="never_made"):
        cluster2.pull("never_made")


@pytest.mark.parametrize("bad", [0, 1])
def test_from_plain_python_too_no_rank_waits_for_one_that_failed(cluster2: nbgpu.Cluster, bad: int) -> None:
    code = f"kept = 3\nif rank == {bad}: raise ValueError('on purpose')\ndist.barrier()"
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.execute(code)
    assert [(f.rank, f.error_type) for f in caught.value.failures] == [(bad, "ValueError")]
    with pytest.raises(nbgpu.RankError) as caught:
        cluster2.apply(_fail_or_wait, bad)
    assert [(f.rank, f.error_type) for f in caught.value.failures] == [(bad, "ValueError")]
    total = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
    assert cluster2.execute(total) == {0: "2 3\n", 1: "2 3\n"}


def test_what_is_sent_right_after_a_failure_is_not_dropped(cluster2: nbgpu.Cluster) -> None:
    for _ in range(20):
        failing = cluster2.submit("raise ValueError('on purpose')")
        nexts = [cluster2.submit("1"), cluster2.submit("2")]
        for results in (failing, *nexts):
            for result in results.values():
                result.wait(30)
        assert all(result.successful() for results in nexts for result in results.values())


@ipp.interactive  # type: ignore[untyped-decorator]
def _fail_or_wait(bad: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == bad:
        raise ValueError("on purpose")
    dist.barrier()


def test_a_gpu_that_is_not_there_is_named_before_anything_starts() -> None:
    with pytest.raises(nbgpu.ConfigError, match="there is no GPU 77"):
        nbgpu.Cluster(gpus="77")


def test_a_second_cluster_is_refused(cluster2: nbgpu.Cluster) -> None:
    with pytest.raises(nbgpu.ClusterError, match=r"already running.*%nbgpu stop"):
        nbgpu.Cluster(gpus="none").start()
    assert cluster2.execute("print(1)")[0] == "1\n"


@pytest.mark.one_host("other hosts need an address of the network; tests/launchers looks at it")
def test_every_socket_listens_on_loopback_only(cluster2: nbgpu.Cluster) -> None:
    cluster2.execute("own_group = dist.new_group([0, 1]); dist.all_reduce(torch.ones(1), group=own_group)")
    processes = {p for pid in cluster2.pids.values() for p in [psutil.Process(pid)]}
    processes |= set(psutil.Process().children(recursive=True))
    listening = [
        (p.pid, c.laddr.ip)
        for p in processes
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert {pid for pid, _ in listening} > set(cluster2.pids.values()), (
        "the engines' own sockets were not seen"
    )
    assert {ip for _, ip in listening} == {"127.0.0.1"}


def test_curve_is_on(cluster2: nbgpu.Cluster) -> None:
    connection = cluster2.parts.state.connection_file.read_text()
    assert '"curve_serverkey": "' in connection
    assert cluster2.parts.state.connection_file.stat().st_mode & 0o077 == 0


def test_the_controller_reads_no_messages(cluster2: nbgpu.Cluster) -> None:
    """Its hub would take a copy of each apart, on the cores that the ranks need."""
    cluster2.execute("1")
    counts = [
        counted
        for engine, counted in cluster2.parts.state.pool.client.queue_status().items()
        if engine != "unassigned"
    ]
    assert [counted["completed"] for counted in counts] == [0] * len(counts)
