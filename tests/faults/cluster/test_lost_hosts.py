"""Faults of ranks on other hosts, and of the hosts themselves."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
import sites
from hosts.namespaces import wait_until
from rows import Measured, row

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
SUM = "t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t), kept)"
CLUSTER_FOLDER = re.compile(r"nbgpu-[0-9a-f]{12}\b")
ON_HOSTS = "CPU, gloo, 3 test hosts"


def right(*kept: object) -> str:
    """What a cell with SUM prints where the ranks keep these values."""
    total = sum(range(len(kept) + 1))
    return f"{ {rank: f'{total} {value}' + chr(10) for rank, value in enumerate(kept)} }\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Site]:
    with sites.new_site(tmp_path_factory.mktemp("site"), PATIENCE_S) as site:
        yield site


@pytest.fixture
def site(made: hosts.Site, request: pytest.FixtureRequest) -> hosts.Site:
    """A cluster of four ranks on two hosts, each of which keeps a value. It is the one of the last test where
    that has left it so."""
    settings = getattr(request, "param", {})
    wanted = repr(sorted(settings.items()))
    if made.notebook.process.poll() is not None:
        made.new_notebook()
    whole = (
        f"'cluster' in globals() and cluster.running and cluster.world_size == 4 and settings == {wanted!r}"
    )
    if not made.notebook.value(f"bool({whole})"):
        made.notebook.run("if 'cluster' in globals(): cluster.stop()")
        made.start(**settings)
        made.notebook.run(f"settings = {wanted!r}")
    made.cell("kept = 7 * rank")
    return made


def train(site: hosts.Site) -> None:
    """Begin a run that does not end by itself, and wait until it has checkpoints."""
    settings = "data='phantoms', patch_size=16, num_phantoms=16, batch_size=1, steps=100_000, val_every=0, checkpoint_every=5"
    runs_dir = str(site.folder / f"runs-{time.monotonic_ns()}")
    site.notebook.run(
        f"cluster.parts.state.news.clear(); run = cluster.train('autoencoder', {settings}, runs_dir={runs_dir!r})"
    )
    site.notebook.run("import time\nwhile run.statuses()[0].step < 12: time.sleep(0.05)")


def come_back(site: hosts.Site, name: str) -> None:
    """A host that was lost dials in, and the next cell takes it."""
    site.dial_in(name)
    code = "while not cluster.parts.state.pool.new_engines(): time.sleep(0.05)"
    site.notebook.run(f"import time\n{code}")
    failed, said = site.notebook.fails("cluster.execute('1')")
    assert failed == "ClusterError"
    assert f"host {name} is back" in said.lower()
    assert "Nothing was run" in said


@row(
    "a rank on another host raises while the others wait in a barrier",
    "the failure is named, all are back, the sum of the next cell is right, variables are kept",
    bound_s=1,
    runs_on=ON_HOSTS,
)
def test_a_rank_on_another_host_raises(site: hosts.Site, measured: Measured) -> None:
    at = site.folder / "moment"
    note = f"import time; open({str(at)!r}, 'w').write(str(time.monotonic()))"
    failed, said = site.notebook.fails(
        f"cluster.execute('if rank == 3:\\n    {note}\\n    1 / 0\\ndist.barrier()')".replace(
            repr(str(at)), f'"{at}"'
        ).replace("'w'", '"w"')
    )
    measured.fault_at(float(at.read_text()))
    measured.ended(said)
    assert failed == "RankError"
    assert "rank 3: ZeroDivisionError" in said
    assert site.cell(SUM) == right(0, 7, 14, 21)


@row(
    "a rank on another host is killed while the others wait for it",
    "it is named with its host and signal, and replaced there; the sum is right, the others keep variables",
    bound_s=6,
    runs_on=ON_HOSTS,
)
def test_a_rank_on_another_host_is_killed(site: hosts.Site, measured: Measured) -> None:
    pid = site.notebook.run("print(cluster.pids[2])").strip()
    begun = site.folder / "begun"
    begun.unlink(missing_ok=True)
    site.notebook.send(
        f'cluster.execute(\'open("{begun}", "w")\\nif rank != 2: dist.barrier()\\nelse: import time; time.sleep(600)\')'
    )
    wait_until(begun.exists, PATIENCE_S, lambda: "the cell does not begin")
    time.sleep(0.3)
    measured.fault_now()
    site.hosts["n2"].run(["kill", "-KILL", pid])
    failed, said = site.notebook.answer()
    measured.ended(said)
    assert failed == "RankError"
    assert "rank 2 on host n2 was killed by SIGKILL" in said
    site.cell("kept = globals().get('kept')")
    assert site.cell(SUM) == right(0, 7, None, 21)
    assert site.cell("import socket; print(socket.gethostname())").count("n2") == 2


@row(
    "a rank on another host is killed between two cells",
    "its end is seen; the next cell names it, and it is replaced",
    bound_s=0.5,
    runs_on=ON_HOSTS,
)
def test_the_end_of_a_rank_on_another_host_is_seen(site: hosts.Site, measured: Measured) -> None:
    pid = site.notebook.run("import time; print(cluster.pids[3])").strip()
    site.notebook.send("while not cluster.ranks.gone(): time.sleep(0.001)\nprint(time.monotonic())")
    time.sleep(0.3)
    killed_mono_s = time.monotonic()
    site.hosts["n2"].run(["kill", "-KILL", pid])
    failed, said = site.notebook.answer()
    assert not failed
    measured.fault_at(killed_mono_s)
    measured.took_s = float(said) - killed_mono_s
    failed, said = site.notebook.fails("cluster.execute('1')")
    assert failed == "ClusterError"
    assert "rank 3 on host n2 was killed by SIGKILL" in said
    assert site.cell("t = torch.ones(1); dist.all_reduce(t); print(int(t))").count("4\\n") == 4


@row(
    "another host's power goes off in a cell; on_host_lost='shrink'",
    "the cell names the host, and the cluster goes on with the ranks that are left, which keep variables; the host is "
    "taken again when it is back",
    bound_s=15,
    runs_on=ON_HOSTS,
)
def test_a_hosts_power_goes_off(site: hosts.Site, measured: Measured) -> None:
    # The first host: the ranks that are left get other numbers.
    name = site.notebook.value("cluster.ranks.assignment.processes[0].host")
    lost = (0, 1)
    kept = [7 * rank for rank in range(4) if rank not in lost]
    begun = site.folder / "begun"
    begun.unlink(missing_ok=True)
    site.notebook.send(
        f'cluster.execute(\'open("{begun}", "w")\\nif rank != {lost[0]}: dist.barrier()\\nelse: import time; time.sleep(600)\')'
    )
    wait_until(begun.exists, PATIENCE_S, lambda: "the cell does not begin")
    time.sleep(0.3)
    measured.fault_now()
    site.hosts[name].power_off()
    failed, said = site.notebook.answer()
    measured.ended(said)
    assert failed == "RankError"
    assert f"rank {lost[0]} on host {name} is gone with its host" in said
    news = site.notebook.run("print(cluster.parts.state.news); cluster.parts.state.news.clear()")
    assert f"host {name} is lost, and the cluster goes on with 2 ranks" in news
    assert site.cell(SUM) == right(*kept)
    assert site.cell("print(rank, world_size)") == "{0: '0 2\\n', 1: '1 2\\n'}\n"
    site.hosts.power_on(name)
    come_back(site, name)
    site.cell("kept = globals().get('kept')")
    assert site.cell(SUM) == right(*kept, None, None)


@row(
    "the link to another host is cut with no reset, and is back later",
    "no rank there computes once the others form the next group, by the clock; no stale sum; the host is taken again",
    bound_s=15,
    runs_on=ON_HOSTS,
)
def test_a_link_is_cut_and_is_back_later(site: hosts.Site, measured: Measured) -> None:
    clock = site.folder / "clock-"
    name, lost = "n2", []
    for rank in range(4):
        Path(f"{clock}{rank}").unlink(missing_ok=True)
        if site.notebook.value(f"cluster.ranks.assignment.processes[{rank}].host") == name:
            lost.append(rank)
    kept = [7 * rank for rank in range(4) if rank not in lost]
    generation = site.notebook.value("cluster.ranks.assignment.generation")
    site.notebook.send(
        "cluster.execute('import os, time\\nwhile True:\\n"
        f'    path = "{clock}" + str(rank); open(path + "-new", "w").write(str(time.time()))\\n'
        '    os.replace(path + "-new", path); time.sleep(0.01)\\n'
        f"    if rank not in {lost}: dist.barrier()')"
    )
    wait_until(
        lambda: all(Path(f"{clock}{r}").exists() for r in lost), PATIENCE_S, lambda: "they do not begin"
    )
    measured.fault_now()
    site.hosts[name].cut_link()
    failed, said = site.notebook.answer()
    measured.ended(said)
    lost_s = time.time()
    assert failed == "RankError"
    assert f"rank {lost[0]} on host {name} is gone with its host" in said
    # The group of those that are left was formed before the cell ended.
    last_s = [float(Path(f"{clock}{rank}").read_text()) for rank in lost]
    assert max(last_s) < lost_s - 1
    site.hosts[name].mend_link()
    assert site.notebook.value("cluster.ranks.assignment.generation") > generation
    assert site.cell(SUM) == right(*kept)
    site.wait_for_all_to_end(site.hosts[name])
    assert [float(Path(f"{clock}{rank}").read_text()) for rank in lost] == last_s
    come_back(site, name)
    assert site.cell("t = torch.ones(1); dist.all_reduce(t); print(int(t))").count("4\\n") == 4


@row(
    "another host's power goes off in a step of a run, and the host is back later; on_host_lost='shrink'",
    "the run goes on from its newest checkpoint with the ranks that are left and with as many samples in a step, and with "
    "all ranks from the next checkpoint after the host's return",
    bound_s=None,
    runs_on=ON_HOSTS,
)
def test_a_run_goes_on_with_the_ranks_that_are_left(site: hosts.Site) -> None:
    train(site)
    site.hosts["n1"].power_off()
    training = "while not run.over and not (len(run.statuses()) == {0} == run.info.world_size and run.statuses()[0].state == 'training'): time.sleep(0.05)"
    site.notebook.run(training.format(2))
    # The ranks that are left have other numbers now, and are heard under these.
    site.notebook.run("while max(status.silent_s for status in run.statuses()) > 2: time.sleep(0.05)")
    batch = "[run.info.global_batch_size, run.config.batch_size, run.config.accumulate]"
    assert site.notebook.value(batch) == [4, 1, 2]
    site.hosts.power_on("n1")
    site.dial_in("n1")
    site.notebook.run(training.format(4))
    site.notebook.run("while not run.over and 'is back' not in str(run.notes()): time.sleep(0.05)")
    assert site.notebook.value(batch) == [4, 1, 1]
    site.notebook.run(f"run.stop(); run.wait({PATIENCE_S}, progress=False)")
    assert site.notebook.value("[run.status, run.info.world_size]") == ["stopped", 4]
    notes = site.notebook.run("print(run.notes())")
    assert "A step has 4 samples as before, with batch_size=1 and accumulate=2" in notes
    assert "Host n1 is back: ranks 2, 3 are new and empty, and there are 4 ranks" in notes
    site.notebook.run("cluster.parts.state.news.clear()")
    assert site.cell("t = torch.ones(1); dist.all_reduce(t); print(int(t))").count("4\\n") == 4


@row(
    "another host's power goes off while a run is paused, and the host is back later; on_host_lost='shrink'",
    "the run stays paused, on the ranks that are left and later on all, until it is resumed; a setting that was changed "
    "in the pause counts then",
    bound_s=None,
    runs_on=ON_HOSTS,
)
def test_a_paused_run_stays_paused_without_a_host_and_with_it_again(site: hosts.Site) -> None:
    train(site)
    site.notebook.run("run.pause()\nwhile {s.state for s in run.statuses()} != {'paused'}: time.sleep(0.05)")
    site.notebook.run("run.set(lr=0.00123)")
    # The first host, so that the rank that reads commands is another one afterwards.
    name = site.notebook.value("cluster.ranks.assignment.processes[0].host")
    site.hosts[name].power_off()
    begun_again = (
        "goes_on = 'Training goes on after step'\n"
        "while not run.over and sum(goes_on in note for note in run.notes()) < {0}: time.sleep(0.05)\n"
        "time.sleep(1)\n"
        "print([status.state for status in run.statuses()])"
    )
    assert site.notebook.run(begun_again.format(1)) == "['paused', 'paused']\n"
    assert site.notebook.value("run.config.lr") == 0.00123
    # As where a checkpoint is written in the last step before a pause.
    site.notebook.run("newest = run.checkpoint(); away = newest.rename(run.folder / 'away')")
    site.hosts.power_on(name)
    site.dial_in(name)
    site.notebook.run(
        "while not cluster.parts.state.pool.has_come(len(cluster.ranks)): time.sleep(0.05)\ntime.sleep(1)"
    )
    site.notebook.run("_ = away.rename(newest)")
    assert site.notebook.run(begun_again.format(2)) == "['paused', 'paused', 'paused', 'paused']\n"
    heals = site.notebook.value("cluster.parts.state.news")
    assert all(heal.endswith("It stays paused until you resume it.") for heal in heals), heals
    # Which of the host's two ranks is named first depends on which connection breaks first.
    assert re.search(rf"was paused, rank [01] on host {name} is gone with its host", heals[0]), heals
    assert f"was paused: Host {name} is back" in heals[1]
    site.notebook.run(
        "step = run.statuses()[0].step\nrun.resume()\nwhile run.statuses()[0].step < step + 3: time.sleep(0.05)"
    )
    site.notebook.run(f"run.stop(); run.wait({PATIENCE_S}, progress=False)")
    assert '"lr": 0.00123' in site.notebook.run("print((run.folder / 'changes.jsonl').read_text())")
    site.notebook.run("cluster.parts.state.news.clear()")


def test_a_run_in_a_folder_that_the_lost_host_did_not_see_ends_and_can_be_resumed(site: hosts.Site) -> None:
    settings = (
        "data='phantoms', patch_size=16, num_phantoms=16, batch_size=1, val_every=0, checkpoint_every=2"
    )
    runs_dir = f"/tmp/runs-{time.monotonic_ns()}"
    site.notebook.run(f"run = cluster.train('autoencoder', {settings}, steps=100_000, runs_dir={runs_dir!r})")
    site.notebook.run(
        "import time\nwhile not list(run.folder.glob('checkpoints/step-*/manifest.json')): time.sleep(0.05)"
    )
    name = site.notebook.value("cluster.ranks.assignment.processes[3].host")
    site.hosts[name].power_off()
    failed, said = site.notebook.fails(f"run.wait({PATIENCE_S}, progress=False)")
    assert failed == "RankError"
    assert "the run ends here, because not all hosts see its folder" in said
    _, said = site.notebook.fails("cluster.execute('1')")
    assert "the cluster goes on with 2 ranks" in said
    written = "int(path.parent.name.removeprefix('step-')) for path in run.folder.glob('checkpoints/step-*/manifest.json')"
    steps = site.notebook.value(f"max({written})") + 2
    site.notebook.run(
        f"run = cluster.train('autoencoder', {settings}, steps={steps}, runs_dir={runs_dir!r}, resume='auto')"
    )
    site.notebook.run(f"run.wait({PATIENCE_S}, progress=False)")
    assert site.notebook.value("run.status") == "finished"
    assert site.notebook.value("'going on from' in str(run.notes())")
    site.hosts.power_on(name)
    come_back(site, name)


WAITS = {"on_host_lost": "wait", "host_patience_s": 120}


@row(
    "another host's power goes off in a cell, and the host is back later; on_host_lost='wait'",
    "the cell names the host, the next one waits for it, and its ranks are replaced there; the others keep variables",
    bound_s=15,
    runs_on=ON_HOSTS,
)
@pytest.mark.parametrize("site", [WAITS], indirect=True, ids=["wait"])
def test_the_next_cell_waits_for_a_host(site: hosts.Site, measured: Measured) -> None:
    begun = site.folder / "begun"
    begun.unlink(missing_ok=True)
    site.notebook.send(
        f'cluster.execute(\'open("{begun}", "w")\\nif rank != 2: dist.barrier()\\nelse: import time; time.sleep(600)\')'
    )
    wait_until(begun.exists, PATIENCE_S, lambda: "the cell does not begin")
    time.sleep(0.3)
    measured.fault_now()
    site.hosts["n2"].power_off()
    failed, said = site.notebook.answer()
    measured.ended(said)
    assert failed == "RankError"
    assert "rank 2 on host n2 is gone with its host" in said
    assert "the next cell waits" in site.notebook.run(
        "print(cluster.parts.state.news); cluster.parts.state.news.clear()"
    )
    assert site.notebook.run("print(cluster.pull('kept', ranks=[0, 1]))") == "{0: 0, 1: 7}\n"
    site.notebook.send("cluster.execute('1')")
    time.sleep(1.0)
    site.notebook.press_stop()
    assert site.notebook.answer()[0] == "KeyboardInterrupt"
    site.notebook.send("cluster.execute('1')")
    site.hosts.power_on("n2")
    site.dial_in("n2")
    failed, said = site.notebook.answer()
    assert failed == "ClusterError"
    assert "host n2 is back" in said
    site.cell("kept = globals().get('kept')")
    assert site.cell(SUM) == right(0, 7, None, None)
    assert site.cell("import socket; print(socket.gethostname())").count("n2") == 2


@pytest.mark.parametrize("site", [{"keep": True}], indirect=True, ids=["keep"])
def test_a_kept_cluster_that_has_lost_a_host_is_attached_to(site: hosts.Site) -> None:
    """The host is no longer on the controller's list when the last notebook attaches."""
    attach = "import nbgpu, time; cluster = nbgpu.attach()"
    hosts.Host.send_signal(site.notebook.process, signal.SIGKILL)
    site.new_notebook()
    site.notebook.run(attach)
    site.hosts["n2"].power_off()
    site.notebook.run("while not cluster.parts.state.pool.lost(): time.sleep(0.05)")
    hosts.Host.send_signal(site.notebook.process, signal.SIGKILL)
    site.new_notebook()
    site.notebook.run(attach)
    failed, said = site.notebook.fails("cluster.execute('1')")
    assert failed == "ClusterError"
    assert "host n2 is lost, and the cluster goes on with 2 ranks. Ranks 0-1 kept all variables" in said
    assert site.cell(SUM) == right(0, 7)
    site.hosts.power_on("n2")
    come_back(site, "n2")
    site.notebook.run("cluster.stop()")


def require_nothing_left(site: hosts.Site, *nodes: hosts.Host) -> None:
    site.wait_for_all_to_end(*nodes)
    for host in nodes:
        assert not CLUSTER_FOLDER.search(host.run(["ls", "/tmp"]).stdout)


@row(
    "the controller of a cluster on other hosts is killed",
    "the next cell says so; no process and no folder is left on the hosts",
    bound_s=10,
    runs_on=ON_HOSTS,
)
def test_the_controller_is_killed(site: hosts.Site, measured: Measured) -> None:
    measured.fault_now()
    site.notebook.run(
        "import signal; cluster.parts.state.pool.processes.leaders['controller'].send(signal.SIGKILL)"
    )
    require_nothing_left(site, *site.nodes)
    measured.ended()
    failed, said = site.notebook.fails("cluster.execute('1')")
    assert failed == "ClusterError"
    assert "the controller of the cluster is gone" in said
    site.notebook.run("cluster.stop()")


@row(
    "the notebook of a cluster on other hosts is killed",
    "no process and no folder is left on any host",
    bound_s=10,
    runs_on=ON_HOSTS,
)
def test_the_notebook_is_killed(site: hosts.Site, measured: Measured) -> None:
    measured.fault_now()
    hosts.Host.send_signal(site.notebook.process, 9)
    require_nothing_left(site, *site.hosts.values())
    measured.ended()
