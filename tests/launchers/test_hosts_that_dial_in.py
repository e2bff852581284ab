"""Ranks on two hosts that dial in to a third, each with a network and folders of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
import leaks
import pytest
import strangers
from hosts.namespaces import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
SUM = "t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t))"
CLUSTER_FOLDER = re.compile(r"nbgpu-[0-9a-f]{12}\b")
RIGHT = "{0: '10\\n', 1: '10\\n', 2: '10\\n', 3: '10\\n'}\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Site]:
    folder = tmp_path_factory.mktemp("site")
    private = [Path.home(), Path("/var/tmp")]
    with (
        hosts.make_hosts(["desk", "n1", "n2"], folder / "hosts", shared=[folder], private=private) as made,
        leaks.holding(lambda leftover: made.have(leftover.pid)),
    ):
        there = hosts.Site(made, folder, PATIENCE_S, on_host_lost="stop")
        try:
            there.start()
            yield there
        finally:
            there.end()


def test_ranks_of_all_hosts_make_one_group(site: hosts.Site) -> None:
    assert site.cell(SUM) == RIGHT
    names = site.cell("import socket; print(socket.gethostname(), local_rank, world_size)")
    assert names == "{0: 'n1 0 4\\n', 1: 'n1 1 4\\n', 2: 'n2 0 4\\n', 3: 'n2 1 4\\n'}\n"


def test_ranks_of_two_hosts_make_a_group_of_their_own(site: hosts.Site) -> None:
    code = "g = dist.new_group([0, 3])\nif rank in (0, 3): t = torch.ones(1); dist.all_reduce(t, group=g); print(int(t))"
    assert site.cell(code) == "{0: '2\\n', 1: '', 2: '', 3: '2\\n'}\n"


def test_torchruns_variables_name_the_hosts_and_where_a_group_meets(site: hosts.Site) -> None:
    names = "RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"
    cell = f"import os; print(*(os.environ[name] for name in {names}))"
    assert site.cell(cell) == ("{0: '0 0 0 2\\n', 1: '1 1 0 2\\n', 2: '2 0 1 2\\n', 3: '3 1 1 2\\n'}\n")
    own = (
        f"dist.destroy_process_group(); dist.init_process_group('gloo'); {SUM}; dist.destroy_process_group()"
    )
    assert site.cell(own) == RIGHT
    assert site.cell(SUM) == RIGHT


def test_only_the_controller_and_the_group_listen_and_on_one_interface(site: hosts.Site) -> None:
    for name in ("desk", "n1", "n2"):
        host = site.hosts[name]
        beyond = {address for address, _ in host.listening() if not address.startswith("127.")}
        assert beyond <= {host.address}
    assert any(address == site.hosts["desk"].address for address, _ in site.hosts["desk"].listening())


STRANGER = """
import sys
sys.path.insert(0, {support!r})
import strangers, zmq
told = [(name, heard) for name, heard in strangers.heard_over_tcp({ports}, {address!r}).items() if not strangers.is_nothing(heard)]
with zmq.Context() as context:
    told += strangers.heard_over_zmq({ports}, context, {address!r})
    context.destroy(linger=0)
print(told)
"""


def test_a_stranger_on_another_host_gets_nothing(site: hosts.Site) -> None:
    support = str(Path(strangers.__file__).parent)
    for name, whence in (("desk", "n1"), ("n1", "n2"), ("n2", "desk")):
        address = site.hosts[name].address
        ports = [port for at, port in site.hosts[name].listening() if at == address]
        assert ports
        code = STRANGER.format(support=support, ports=ports, address=address)
        assert site.hosts[whence].python(code) == "[]\n"
    assert site.cell(SUM) == RIGHT


def test_no_key_is_in_an_environment_a_command_line_or_a_log(site: hosts.Site) -> None:
    keys = site.notebook.run(
        "import json\nfor each in json.loads(cluster.join_file.read_text())['meeting'].values(): print(each)\n"
        "for name, each in json.loads(cluster.join_file.read_text())['engine_connection'].items():\n"
        "    if 'curve' in name or name == 'key': print(each)"
    ).split()
    secret = [key.encode() for key in keys if len(key) >= 30 and "://" not in key]
    assert len(secret) >= 3
    for host in site.hosts.values():
        for pid in host.pids():
            for of_process in ("environ", "cmdline"):
                content = Path(f"/proc/{pid}/{of_process}").read_bytes()
                assert not [key for key in secret if key in content]
    assert not [key for key in secret if key.decode() in site.logs()]


def test_a_rank_that_raises_frees_those_on_the_other_host(site: hosts.Site) -> None:
    failed, said = site.notebook.fails("cluster.execute('if rank == 3:\\n    1 / 0\\ndist.barrier()')")
    assert failed == "RankError"
    assert "rank 3: ZeroDivisionError" in said
    assert site.cell(SUM) == RIGHT


def test_stop_ends_a_wait_for_a_rank_on_another_host(site: hosts.Site) -> None:
    site.notebook.send("cluster.execute('print(1, flush=True)\\nif rank < 3: dist.barrier()')")
    time.sleep(1.0)
    site.notebook.press_stop()
    failed, _ = site.notebook.answer()
    assert failed in ("KeyboardInterrupt", "CellInterrupted")
    assert site.cell(SUM) == RIGHT


def test_a_rank_that_is_killed_is_replaced_on_its_own_host(site: hosts.Site) -> None:
    pid = site.notebook.run("print(cluster.pids[2])").strip()
    site.notebook.send("cluster.execute('if rank != 2: dist.barrier()\\nelse: import time; time.sleep(60)')")
    time.sleep(1.0)
    site.hosts["n2"].run(["kill", "-KILL", pid])
    failed, said = site.notebook.answer()
    assert failed == "RankError"
    assert "rank 2 on host n2 was killed by SIGKILL" in said
    assert site.cell(SUM) == RIGHT
    assert site.cell("import socket; print(socket.gethostname())").count("n2") == 2


def test_large_values_travel_both_ways(site: hosts.Site) -> None:
    site.notebook.run("import numpy as np; given = np.arange(2_000_000); cluster.push(given=given)")
    same = "all((each == given).all() for each in cluster.pull('given', ranks='all').values())"
    assert site.notebook.run(f"print({same})") == "True\n"


def test_input_without_a_notebook_says_that_nobody_can_answer(site: hosts.Site) -> None:
    failed, said = site.notebook.fails("cluster.execute('if rank == 2: input()')")
    assert failed == "RankError"
    assert "rank 2 called input(), and there is nobody to answer" in said


def test_variables_are_saved_into_a_folder_that_no_host_sees(site: hosts.Site) -> None:
    site.cell("mine = rank * 2")
    site.notebook.run("import os; os.makedirs('/tmp/own'); cluster.save('/tmp/own/saved', ['mine'])")
    site.cell("del mine")
    site.notebook.run("cluster.load('/tmp/own/saved')")
    assert site.notebook.run("print(cluster.pull('mine', ranks='all'))") == "{0: 0, 1: 2, 2: 4, 3: 6}\n"


@pytest.mark.long
def test_a_run_trains_over_both_hosts_into_a_folder_that_all_share(site: hosts.Site) -> None:
    settings = "data='phantoms', patch_size=16, num_phantoms=16, batch_size=1, steps=4, val_every=0, checkpoint_every=4"
    site.notebook.run(
        f"run = cluster.train('autoencoder', {settings}, runs_dir={str(site.folder / 'runs')!r}).wait({PATIENCE_S})"
    )
    assert site.notebook.run("print(run.info.world_size, run.status)") == "4 finished\n"
    assert list(site.folder.glob("runs/*/checkpoints/step-*"))


@pytest.mark.long
def test_a_host_that_is_cut_off_ends_before_the_others_go_on_without_it(site: hosts.Site) -> None:
    """No rank of a lost host computes once the notebook counts it as lost."""
    clock = site.folder / "clock-"
    site.notebook.send(
        "cluster.execute('import os, time\\nwhile True:\\n"
        f'    path = "{clock}" + str(rank); open(path + "-new", "w").write(str(time.time()))\\n'
        '    os.replace(path + "-new", path); time.sleep(0.01)\\n'
        "    if rank < 2: dist.barrier()')"
    )
    wait_until(lambda: Path(f"{clock}3").exists(), PATIENCE_S, lambda: "rank 3 does not begin")
    site.hosts["n2"].cut_link()
    failed, said = site.notebook.answer()
    lost_s = time.time()
    assert failed == "RankError"
    assert "rank 2 on host n2 is gone with its host" in said
    assert all(float(Path(f"{clock}{rank}").read_text()) < lost_s for rank in (2, 3))
    site.wait_for_all_to_end(site.hosts["n2"])
    time.sleep(0.2)
    assert all(float(Path(f"{clock}{rank}").read_text()) < lost_s for rank in (2, 3))
    site.hosts["n2"].mend_link()
    failed, said = site.notebook.fails(f"cluster.execute({SUM!r})")
    assert failed == "ClusterError"
    assert "host n2 is lost" in said
    assert site.notebook.run("print(cluster.pull('rank', ranks=[0, 1]))") == "{0: 0, 1: 1}\n"
    assert "dial in" in said


def test_nothing_is_left_on_any_host_after_the_end(site: hosts.Site) -> None:
    site.notebook.run("cluster.stop()")
    site.wait_for_all_to_end(site.hosts["n1"], site.hosts["n2"])
    for host in site.nodes:
        assert not host.run(["ls", "/dev/shm"]).stdout.strip()
        assert not CLUSTER_FOLDER.search(host.run(["ls", "/tmp"]).stdout)
    assert len(site.hosts["desk"].pids()) <= 2


AHEAD = """import time
right = time.time
time.time = lambda: right() + 100
"""


@pytest.mark.long
def test_times_are_by_the_notebooks_clock(site: hosts.Site) -> None:
    (site.folder / "clock").mkdir()
    (site.folder / "clock" / "sitecustomize.py").write_text(AHEAD)
    site.environment_of["n2"] = {"PYTHONPATH": str(site.folder / "clock")}
    site.start()
    assert (
        site.notebook.value("len(set(cluster.execute('import time; print(int(time.time() / 50))').values()))")
        >= 2
    )
    status = site.notebook.run("print(cluster.status())")
    assert re.search(r"the clock of host n2 is 1 min (39|40|41) s ahead of this host's", status), status
    assert "host n1 is" not in status
    settings = "data='phantoms', patch_size=16, num_phantoms=16, batch_size=1, steps=2, val_every=0"
    runs_dir = str(site.folder / "runs")
    site.notebook.run(
        f"run = cluster.train('autoencoder', {settings}, runs_dir={runs_dir!r}).wait({PATIENCE_S})"
    )
    newest_s = site.notebook.value("list(run.metrics().groupby('rank').time_s.max())")
    assert len(newest_s) == 4
    assert max(newest_s) - min(newest_s) < 50
    site.notebook.run("cluster.stop()")
    site.wait_for_all_to_end(site.hosts["n1"], site.hosts["n2"])


@pytest.mark.long
def test_hosts_end_with_a_notebook_that_is_killed(site: hosts.Site) -> None:
    site.start()
    assert site.cell(SUM) == RIGHT
    site.notebook.process.kill()
    site.wait_for_all_to_end(*site.hosts.values())
    for host in site.hosts.values():
        assert not CLUSTER_FOLDER.search(host.run(["ls", "/tmp"]).stdout)
