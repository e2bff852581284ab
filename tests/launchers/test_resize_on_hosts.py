"""Another number of ranks where they are on two hosts: a host may be without ranks, and be lost meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hosts
import pytest
import sites

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
SUM = "t = torch.ones(1); dist.all_reduce(t); print(int(t))"
WHERE = "import socket; print(socket.gethostname(), local_rank, world_size, 'kept' in globals())"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Site]:
    with sites.new_site(tmp_path_factory.mktemp("site"), PATIENCE_S) as site:
        site.start(keep=True)
        yield site


@pytest.fixture
def site(made: hosts.Site) -> hosts.Site:
    """A cluster with two ranks on each of two hosts, and nothing of the test before."""
    made.notebook.run("cluster.resize(4)")
    made.cell("globals().pop('kept', None)")
    return made


def resize(site: hosts.Site, ranks: int) -> str:
    return site.notebook.run(f"print(cluster.resize({ranks}))")


def require_sum(site: hosts.Site, ranks: int) -> None:
    assert site.notebook.value(f"list(cluster.execute({SUM!r}).values())") == [f"{ranks}\n"] * ranks


def slots(site: hosts.Site) -> list[list[str]]:
    """For each rank its host, its local rank, the number of ranks, and whether it has `kept`."""
    return [line.split() for line in site.notebook.value(f"list(cluster.execute({WHERE!r}).values())")]


def test_ranks_of_a_host_leave_and_come(site: hosts.Site) -> None:
    site.cell("kept = rank")
    pids = site.notebook.value("cluster.pids")
    said = resize(site, 2)
    assert "ranks 2-3 left, and the variables there are gone; ranks 0-1 kept all variables" in said
    assert "2 CPU ranks on 1 host" in said
    require_sum(site, 2)
    assert not {pids["2"], pids["3"]} & set(site.hosts["n2"].pids())
    assert "host n2 has no ranks now" in site.notebook.run("print(cluster.status())")
    assert "rank 2 is new and empty" in resize(site, 3)
    assert slots(site) == [
        ["n1", "0", "3", "True"],
        ["n1", "1", "3", "True"],
        ["n2", "0", "3", "False"],
    ]
    assert "4 CPU ranks on 2 hosts" in resize(site, 4)
    assert slots(site)[3] == ["n2", "1", "4", "False"]
    assert "there are 4 ranks already" in resize(site, 4)


def test_more_ranks_than_the_hosts_have_room_for_are_refused(site: hosts.Site) -> None:
    failed, said = site.notebook.fails("cluster.resize(5)")
    assert failed == "ConfigError"
    assert "the hosts have room for 4 ranks (n1 2, n2 2)" in said
    assert "gpus_per_node" in said
    assert site.notebook.fails("cluster.resize(0)")[0] == "ConfigError"
    require_sum(site, 4)


END_RANK_1 = """
from nbgpu.client.engines.ranks import Ranks
form_again = Ranks._form_again
def end_first(ranks):
    Ranks._form_again = form_again
    ranks.end([1], "was ended by the test")
    return form_again(ranks)
Ranks._form_again = end_first
"""


def test_a_rank_that_dies_on_the_way_undoes_it(site: hosts.Site) -> None:
    resize(site, 2)
    site.cell("kept = rank")
    site.notebook.run(END_RANK_1)
    failed, said = site.notebook.fails("cluster.resize(4)")
    assert failed == "ClusterError"
    assert "rank 1 was replaced and is empty; rank 0 kept all variables" in said
    assert "The cluster has 2 ranks, as before" in said
    require_sum(site, 2)
    assert slots(site) == [["n1", "0", "2", "True"], ["n1", "1", "2", "False"]]
    assert "2 CPU ranks on 1 host" in site.notebook.run("print(cluster.describe())")


def test_a_run_and_a_study_of_a_cell_have_the_ranks_that_there_are(site: hosts.Site) -> None:
    resize(site, 3)
    settings = {"data": "phantoms", "patch_size": 16, "num_phantoms": 6, "batch_size": 1, "val_every": 0}
    settings |= {"steps": 2, "threads": 1, "runs_dir": str(site.folder / "runs")}
    site.notebook.run(f"run = cluster.train('autoencoder', **{settings!r}).wait(100)")
    assert site.notebook.value("[run.status, run.info.world_size]") == ["finished", 3]
    study = "from nbgpu.client.scaling import cell_study; study = cell_study.prepared(cluster, [1, {}], 'weak', 1, 3, 1)"
    failed, said = site.notebook.fails(study.format(5))
    assert failed == "ConfigError"
    assert "the hosts have room for 4 ranks" in said
    site.notebook.run(study.format(4))
    step = "def step():\n    t = torch.ones(1); dist.all_reduce(t)"
    site.notebook.run(f"study.measure(cluster, {step!r}, lambda: None)")
    assert site.notebook.value("[bool(each.step_s) for each in study._measured]") == [True, True]
    require_sum(site, 3)


def test_a_host_without_ranks_may_go_and_come(site: hosts.Site) -> None:
    """No cell waits for it, and it can have ranks when it is back."""
    resize(site, 2)
    site.cell("kept = rank")
    site.hosts["n2"].power_off()
    site.notebook.run(
        "while all(host.is_there for host in cluster.parts.state.pool.members): time.sleep(0.05)"
    )
    require_sum(site, 2)
    assert "host n2 is lost" in site.notebook.run("print(cluster.status())")
    failed, said = site.notebook.fails("cluster.resize(4)")
    assert failed == "ConfigError"
    assert "room for 2 ranks (n1 2)" in said
    assert "n2 is lost, and has room when it is back" in said
    site.hosts.power_on("n2")
    site.dial_in("n2")
    site.notebook.run("while not cluster.parts.state.pool.new_engines(): time.sleep(0.05)")
    require_sum(site, 2)
    resize(site, 4)
    require_sum(site, 4)
    assert slots(site)[2:] == [["n2", "0", "4", "False"], ["n2", "1", "4", "False"]]


def test_a_host_that_comes_back_gets_no_more_ranks_than_are_wanted(site: hosts.Site) -> None:
    resize(site, 3)
    site.hosts["n2"].power_off()
    site.notebook.run("while not cluster.parts.state.pool.lost(): time.sleep(0.05)")
    said = site.notebook.run("print(cluster.status())").splitlines()
    assert [line for line in said if line.split()[:2] == ["2", "n2"] and line.endswith("lost with its host")]
    assert "host n2 is lost" in said
    failed, said = site.notebook.fails("cluster.execute('1')")
    assert failed == "ClusterError"
    assert "host n2 is lost, and the cluster goes on with 2 ranks" in said
    require_sum(site, 2)
    site.hosts.power_on("n2")
    site.dial_in("n2")
    site.notebook.run("while not cluster.parts.state.pool.new_engines(): time.sleep(0.05)")
    failed, said = site.notebook.fails("cluster.execute('1')")
    assert "Host n2 is back: rank 2 is new and empty, and there are 3 ranks" in said
    require_sum(site, 3)
    # Of a smaller cluster it gets none, and no cell is held up.
    site.hosts["n2"].power_off()
    site.notebook.run("while not cluster.parts.state.pool.lost(): time.sleep(0.05)")
    assert "goes on with 2 ranks" in site.notebook.fails("cluster.execute('1')")[1]
    resize(site, 1)
    site.hosts.power_on("n2")
    site.dial_in("n2")
    site.notebook.run("while not cluster.parts.state.pool.new_engines(): time.sleep(0.05)")
    assert not site.notebook.value("cluster.parts.state.pool.has_come(len(cluster.ranks))")
    require_sum(site, 1)
    resize(site, 4)
    require_sum(site, 4)


def test_a_host_whose_ranks_did_not_come_is_tried_again(site: hosts.Site) -> None:
    site.hosts["n2"].power_off()
    site.notebook.run("while not cluster.parts.state.pool.lost(): time.sleep(0.05)")
    assert "goes on with 2 ranks" in site.notebook.fails("cluster.execute('1')")[1]
    site.hosts.power_on("n2")
    site.dial_in("n2")
    site.notebook.run("while not cluster.parts.state.pool.new_engines(): time.sleep(0.05)")
    site.notebook.run(END_RANK_1)
    assert site.notebook.fails("cluster.execute('1')")[0] == "ClusterError"
    assert "rank 1 was replaced" in site.notebook.fails("cluster.execute('1')")[1]
    assert "ranks 2, 3 are new and empty" in site.notebook.fails("cluster.execute('1')")[1]
    require_sum(site, 4)


def test_another_notebook_finds_the_host_without_ranks(site: hosts.Site) -> None:
    resize(site, 2)
    site.cell("kept = rank")
    hosts.Host.send_signal(site.notebook.process, signal.SIGKILL)
    site.new_notebook()
    site.notebook.run("import nbgpu, threading, time; cluster = nbgpu.attach()")
    assert "host n2 has no ranks now" in site.notebook.run("print(cluster.status())")
    assert "2 CPU ranks on 1 host" in site.notebook.run("print(cluster.describe())")
    resize(site, 4)
    assert slots(site)[1:3] == [["n1", "1", "4", "True"], ["n2", "0", "4", "False"]]
    require_sum(site, 4)


def test_a_restart_has_as_many_ranks_and_its_end_ends_all_hosts(site: hosts.Site) -> None:
    resize(site, 2)
    site.restart()
    require_sum(site, 2)
    resize(site, 4)
    require_sum(site, 4)
    resize(site, 1)
    site.notebook.run("cluster.stop()")
    site.wait_for_all_to_end(*site.nodes)
