"""A notebook on one host whose ranks ssh starts on two others, which share no folder with it."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from conftest import REPOSITORY
from hosts import FarPython
from hosts.namespaces import Host, command_of, wait_until
from hosts.secure_shell import start_sshd

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 300
SUM = "print(c.execute('t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t))'))"
RIGHT = "{0: '10\\n', 1: '10\\n', 2: '10\\n', 3: '10\\n'}\n"


def refusal(notebook: FarPython, cell: str) -> str:
    """The error that a cell raises, with its name, after what the cell has printed."""
    return ": ".join(notebook.fails(cell))


def start(ssh: hosts.SecureShell, **settings: object) -> str:
    """The cell that starts a cluster."""
    options = {"ssh": f"-F {ssh.configuration}"}
    given = {"hosts": ["n1", "n2"], "launcher_options": options, "gpus": "none", "gpus_per_node": 2}
    words = ", ".join(f"{name}={value!r}" for name, value in {**given, **settings}.items())
    return f"import nbgpu; c = nbgpu.Cluster(launcher='ssh', {words}); c.start()"


@pytest.fixture(scope="module")
def notebook(test_ssh: hosts.SecureShell) -> Iterator[FarPython]:
    with FarPython(test_ssh.hosts["laptop"], PATIENCE_S) as opened:
        opened.run("import nbgpu")
        yield opened


@pytest.fixture(scope="module")
def started(test_ssh: hosts.SecureShell, notebook: FarPython) -> Iterator[FarPython]:
    notebook.run(start(test_ssh))
    yield notebook
    notebook.run("c.stop()")


def ranks_of(host: Host) -> list[int]:
    """The processes of a host that are none of its own."""
    commands = {pid: command_of(pid) for pid in host.pids()}
    return [pid for pid, command in commands.items() if command and b"sshd" not in command]


def test_ranks_of_both_hosts_are_one_group(started: FarPython) -> None:
    said = started.run(
        "print(c.execute('import platform; print(platform.node(), rank, local_rank, world_size)'))"
    )
    assert said == str({0: "n1 0 0 4\n", 1: "n1 1 1 4\n", 2: "n2 2 0 4\n", 3: "n2 3 1 4\n"}) + "\n"
    assert started.run(SUM) == RIGHT
    assert "4 CPU ranks on 2 hosts" in started.run("print(c.describe())")


def test_a_distributed_cell_prints_what_its_ranks_print(started: FarPython) -> None:
    # The extension starts processes of this host in advance, which are not looked at here.
    started.run("import os; os.environ['NBGPU_PRELOAD'] = '0'")
    shell = "from IPython.core.interactiveshell import InteractiveShell as S; s = S.instance()"
    started.run(f"{shell}; s.run_line_magic('load_ext', 'nbgpu')")
    said = started.run("s.run_cell_magic('distributed', '', 'import os; print(rank, os.getcwd())')")
    # The notebook's folder is there, too: it is the checkout's.
    assert f"3 {Path.cwd()}" in said


def test_values_travel_both_ways(started: FarPython) -> None:
    started.run("c.push(numbers=list(range(100_000)))")
    assert started.value("c.pull('numbers', rank=3)[-1]") == 99_999


def test_stop_frees_ranks_that_wait_for_another_host(started: FarPython, test_ssh: hosts.SecureShell) -> None:
    marks = ["/tmp/begun-0", "/tmp/begun-2"]
    cell = "import time; open(f'/tmp/begun-{rank}', 'w')\nif rank:\n    time.sleep(600)\ndist.barrier()"
    started.send(f"c.execute({cell!r})")
    for host, mark in zip(("n1", "n2"), marks, strict=True):
        begun = ["test", "-e", mark]
        wait_until(
            lambda host=host, begun=begun: not test_ssh.hosts[host].run(begun, check=False).returncode,
            PATIENCE_S,
            lambda: "the cell has not begun",
        )
    started.press_stop()
    assert started.answer()[0] == "KeyboardInterrupt"
    assert started.run(SUM) == RIGHT


def test_a_rank_that_is_killed_on_another_host_is_replaced_there(
    started: FarPython, test_ssh: hosts.SecureShell
) -> None:
    pid = started.value("c.pids[2]")
    test_ssh.hosts["n2"].run(["kill", "-KILL", str(pid)])
    started.run("import time\nwhile not c.ranks.gone(): time.sleep(0.02)")
    said = refusal(started, "c.execute('1')")
    assert re.search("rank 2 on host n2 was killed by SIGKILL", said), said
    assert started.run(SUM) == RIGHT
    assert started.run("print(c.execute('import platform; print(platform.node())', ranks=[2]))") == (
        "{2: 'n2\\n'}\n"
    )


SETTINGS = (
    "data='phantoms', patch_size=16, num_phantoms=16, batch_size=1, checkpoint_every=2, keep_checkpoints=2, val_every=2, "
    "best_metric='loss', best_mode='max'"
)
READ = """
import csv, hashlib, json
from pathlib import Path

def numbers(run):
    with (run.folder / 'metrics.csv').open() as file:
        return [[row[name] for name in ('step', 'epoch', 'rank', 'loss', 'grad_norm', 'lr', 'val_loss')]
                for row in csv.DictReader(file)]

def hashes(run):
    return {str(path.relative_to(run.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((run.folder / 'checkpoints').glob('*/*.safetensors'))}

def names(run):
    found = {str(path.relative_to(run.folder)) for path in run.folder.rglob('*') if path.is_file()}
    return sorted(name for name in found if 'endpoint' not in name)
"""


@pytest.fixture(scope="module")
def both_runs(started: FarPython, test_ssh: hosts.SecureShell) -> None:
    """The notebook's variables `own` and `shared`: a run, and one that goes on from it, in a folder that only
    the notebook's host sees, and in one that all hosts see."""
    shared = test_ssh.configuration.parent / "runs"
    started.run(READ)
    for name, place in (("own", "/tmp/runs"), ("shared", str(shared))):
        where = f"runs_dir={place!r}"
        started.run(f"{name} = [c.train('autoencoder', {SETTINGS}, steps=8, {where}).wait({PATIENCE_S})]")
        # It goes on from the checkpoint there, and ends with the best one, which is the first run's.
        more = f"steps=10, resume='auto', restore_best=True, {where}"
        started.run(f"{name}.append(c.train('autoencoder', {SETTINGS}, {more}).wait({PATIENCE_S}))")


@pytest.mark.usefixtures("both_runs")
def test_a_run_in_a_folder_of_the_notebooks_host_is_that_of_a_shared_folder(started: FarPython) -> None:
    for nth in (0, 1):
        for what in (
            "hashes({})",
            "names({})",
            "(Path({}.folder) / 'best.json').read_text().rpartition('/')[2]",
        ):
            own, of_shared = (
                started.run(f"print({what.format(f'{each}[{nth}]')})") for each in ("own", "shared")
            )
            assert own == of_shared
    assert started.value("numbers(own[0]) == numbers(shared[0])")
    assert started.value("len(numbers(own[0]))") == 32
    assert started.value("own[1].result() == shared[1].result()")
    assert started.value(
        "own[1].notes() == [note.replace(shared[0].folder.name, own[0].folder.name)"
        " for note in shared[1].notes()]"
    )


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_on_other_hosts_hears_commands_and_is_heard(
    started: FarPython, test_ssh: hosts.SecureShell, is_shared: bool
) -> None:
    where = str(test_ssh.configuration.parent / "runs") if is_shared else "/tmp/runs"
    settings = SETTINGS.replace("val_every=2", "val_every=0").partition(", best_metric")[0]
    started.run(f"run = c.train('autoencoder', {settings}, steps=100_000, runs_dir={where!r})")
    started.run("import time\nwhile run.status != 'training': time.sleep(0.05)")
    started.run("run.pause()\nwhile run.status != 'paused': time.sleep(0.05)")
    # No socket of these hosts is heard here.
    started.run("begun_s = time.monotonic()\nwhile time.monotonic() - begun_s < 4: time.sleep(0.05)")
    assert started.value("max(status.silent_s for status in run.statuses())") < 4
    started.run(f"run.stop(); run.wait({PATIENCE_S})")
    assert started.run("print(run.status, run.hang, run.checkpoint().parent.parent == run.folder)") == (
        "stopped  True\n"
    )


STOP_WHEN_THERE_IS_ROOM = """
while True:
    try:
        run.stop()
        break
    except nbgpu.RunError as error:
        assert 'No space left' in str(error)
        time.sleep(0.02)
"""


def test_a_full_disk_of_the_notebooks_host_delays_its_files_and_stop_gives_them_up(
    started: FarPython, test_ssh: hosts.SecureShell
) -> None:
    laptop = test_ssh.hosts["laptop"]
    started.run("import time")
    small = "mkdir /tmp/small && mount -t tmpfs -o size=300k small /tmp/small"
    laptop.run(["sh", "-c", small])
    settings = SETTINGS.replace("val_every=2", "val_every=0").partition(", best_metric")[0]
    for remedy in ("make room", "stop"):
        started.run(f"run = c.train('autoencoder', {settings}, steps=2, runs_dir='/tmp/small')")
        started.run("while not run.hang: time.sleep(0.05)")
        said = started.run("print(run.hang)")
        assert re.search(r"on their way here: .* host n1 \(/tmp/small/.* No space left on device\.", said), (
            said
        )
        assert not started.value("run.over")
        if remedy == "stop":
            # Between two tries to bring the files there is room for the command. Until then stop() says that
            # there is none.
            started.run(STOP_WHEN_THERE_IS_ROOM)
            started.run(f"run.wait({PATIENCE_S})")
            assert "is not complete" in started.run("print(run.notes())")
        else:
            laptop.run(["mount", "-o", "remount,size=4m", "/tmp/small"])
            started.run(f"run.wait({PATIENCE_S}); print(run.checkpoint())")
            laptop.run(["sh", "-c", "rm -r /tmp/small/*; mount -o remount,size=300k /tmp/small"])


@pytest.mark.usefixtures("both_runs")
def test_variables_and_predictions_come_to_the_notebooks_host(started: FarPython) -> None:
    started.run("c.execute('a = rank; t = torch.full((1000,), 1.5)'); c.save('/tmp/saved')")
    started.run("c.execute('a = 9; del t'); c.load('/tmp/saved')")
    assert started.run("print(c.pull('a', ranks='all'))") == "{0: 0, 1: 1, 2: 2, 3: 3}\n"
    started.run(
        "predicted = [c.predict(each[0], 'phantoms', out=f'{each[0].folder}-predicted', max_samples=5) "
        "for each in (own, shared)]"
    )
    tables = "[(each.folder / 'predictions.csv').read_text() for each in predicted]"
    assert started.value(f"len(set({tables}))") == 1
    assert (
        started.value("len({frozenset(path.name for path in each.folder.iterdir()) for each in predicted})")
        == 1
    )


def test_only_the_interface_that_the_hosts_see_listens(
    started: FarPython, test_ssh: hosts.SecureShell
) -> None:
    laptop = test_ssh.hosts["laptop"]
    assert {address for address, _ in laptop.listening()} == {laptop.address}
    for name in ("n1", "n2"):
        host = test_ssh.hosts[name]
        assert {address for address, _ in host.listening()} <= {host.address, "127.0.0.1"}


def test_the_keys_stand_in_no_command_line_and_no_environment(
    started: FarPython, test_ssh: hosts.SecureShell
) -> None:
    key = started.value("json.loads(c.join_file.read_text())['engine_connection']['curve_serverkey']")
    assert len(key) == 40
    for host in test_ssh.hosts.values():
        pids = ranks_of(host)
        assert pids
        for pid in pids:
            for what in ("cmdline", "environ"):
                assert key.encode() not in Path(f"/proc/{pid}/{what}").read_bytes()


def left_on(host: Host) -> list[str]:
    """What a cluster has left on a host: processes, and folders of the kind that it makes."""
    # The checkout's folder, which a clone calls nbgpu, stands in the command of the test's own Python, too.
    commands = [
        command_of(pid).decode().replace("\0", " ").replace(str(REPOSITORY), "") for pid in ranks_of(host)
    ]
    folders = host.run(["sh", "-c", "ls -d /tmp/nbgpu-* | grep -v test"], check=False).stdout.split()
    return [*(command for command in commands if "nbgpu" in command), *folders]


def require_nothing_left(test_ssh: hosts.SecureShell) -> None:
    for host in test_ssh.hosts.values():
        wait_until(lambda host=host: not left_on(host), 20, lambda host=host: (host.name, left_on(host)))


def test_a_host_that_was_off_is_started_again_by_itself(
    started: FarPython, test_ssh: hosts.SecureShell
) -> None:
    test_ssh.hosts["n2"].power_off()
    started.run("import time\nwhile not c.ranks.gone(): time.sleep(0.05)")
    said = refusal(started, "c.execute('1')")
    assert "host n2 is lost, and the cluster goes on with 2 ranks" in said
    assert started.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
    start_sshd(test_ssh.hosts.power_on("n2"), test_ssh.configuration.parent)
    started.run("while not c.parts.state.pool.new_engines(): time.sleep(0.05)")
    said = refusal(started, "c.execute('1')")
    assert "Host n2 is back: ranks 2, 3 are new and empty, and there are 4 ranks" in said
    assert started.run(SUM) == RIGHT


def test_stop_leaves_nothing_on_any_host(started: FarPython, test_ssh: hosts.SecureShell) -> None:
    assert all(left_on(host) for host in test_ssh.hosts.values())
    started.run("c.stop()")
    require_nothing_left(test_ssh)


@pytest.mark.release
def test_a_sweep_trains_a_trial_on_each_host(notebook: FarPython, test_ssh: hosts.SecureShell) -> None:
    options = {"ssh": f"-F {test_ssh.configuration}"}
    settings = (
        "data='phantoms', patch_size=16, num_phantoms=4, batch_size=1, steps=2, val_every=1, seed=[1, 2]"
    )
    where = f"launcher='ssh', hosts=['n1', 'n2'], launcher_options={options!r}, gpus='none', runs_dir='/tmp/swept'"
    notebook.run(f"s = nbgpu.sweep('autoencoder', {settings}, {where})\ns.wait({PATIENCE_S}, progress=False)")
    assert notebook.value("list(s.table()['state'])") == ["finished"] * 2, notebook.run("print(s.table())")
    assert notebook.value("s.num_parallel") == 2
    assert notebook.value("[bool(t.best) for t in s.trials]") == [True] * 2
    require_nothing_left(test_ssh)


@pytest.mark.release
def test_a_study_measures_how_training_scales_over_hosts(
    notebook: FarPython, test_ssh: hosts.SecureShell
) -> None:
    options = {"ssh": f"-F {test_ssh.configuration}"}
    settings = (
        "data='phantoms', patch_size=16, num_phantoms=8, batch_size=1, threads=1, studies_dir='/tmp/studied'"
    )
    where = f"launcher='ssh', hosts=['n1', 'n2'], launcher_options={options!r}, gpus='none'"
    steps = "repeats=1, measured_steps=3, warm_up_steps=1"
    notebook.run(
        f"s = nbgpu.scaling('autoencoder', ranks=[1, 2, 4], {steps}, {settings}, {where})\n"
        f"s.wait({PATIENCE_S}, progress=False)"
    )
    table = notebook.run("print(s)")
    assert notebook.value("[(each.point, len(each.step_s), each.why_failed) for each in s.measured()]") == [
        [0, 3, ""],
        [1, 3, ""],
        [2, 3, ""],
    ], table
    assert notebook.value("s.plan.cluster.gpus_per_node") == 2
    # The runs had the ranks that the table says, and they were where it says.
    found = "from nbgpu.run_folder import folder as runs"
    notebook.run(
        f"{found}\ninfos = [runs.read_info(p.parent) for p in sorted(s.folder.glob('*/*/run_info.json'))]"
    )
    assert notebook.value("[info.world_size for info in infos]") == [1, 2, 4]
    # The notebook's host is another one.
    assert notebook.value("[type(s)(s.folder).environment[each] for each in ('host', 'transport')]") == [
        "n1, n2",
        "gloo",
    ]
    require_nothing_left(test_ssh)


def test_a_study_of_more_ranks_than_hosts_have_room_for_is_refused(
    notebook: FarPython, test_ssh: hosts.SecureShell
) -> None:
    where = "launcher='ssh', hosts=['n1', 'n2'], gpus='none', gpus_per_node=1"
    said = refusal(notebook, f"nbgpu.scaling('autoencoder', ranks=[2, 4], data='phantoms', {where})")
    assert "ranks = 4: 2 host(s) with gpus_per_node=1 have room for 2 ranks" in said
    require_nothing_left(test_ssh)


def test_a_host_that_is_not_reached_is_named_and_nothing_is_left_on_the_other(
    notebook: FarPython, test_ssh: hosts.SecureShell
) -> None:
    said = refusal(notebook, start(test_ssh, hosts=["n1", "nowhere.invalid"]))
    assert re.search(r"^ClusterError: nowhere\.invalid: there is no host of that name", said), said
    require_nothing_left(test_ssh)


def test_a_host_that_does_not_reach_the_notebook_says_where_it_looked(
    notebook: FarPython, test_ssh: hosts.SecureShell
) -> None:
    looked = r"n1 did not join. n1: .* does not answer at 127\.0\.0\.1:\d+, interface lo \(127\.0\.0\.1\)"
    said = refusal(notebook, start(test_ssh, hosts="n1", interface="lo"))
    assert re.search(looked, said), said
    require_nothing_left(test_ssh)


def test_lines_of_setup_that_fail_are_told(notebook: FarPython, test_ssh: hosts.SecureShell) -> None:
    said = refusal(notebook, start(test_ssh, hosts="n1", setup=["echo begun", "no-such-module load cuda"]))
    assert re.search(r"n1: the lines of setup failed there: .*module", said), said


def test_stop_during_the_start_leaves_nothing(notebook: FarPython, test_ssh: hosts.SecureShell) -> None:
    notebook.send(start(test_ssh, setup="export NBGPU_OF_A_TEST=1"))
    wait_until(lambda: ranks_of(test_ssh.hosts["n2"]), PATIENCE_S, lambda: "nothing was started")
    notebook.press_stop()
    assert notebook.answer()[0] == "KeyboardInterrupt"
    require_nothing_left(test_ssh)


def test_the_notebooks_end_leaves_nothing_on_any_host(test_ssh: hosts.SecureShell) -> None:
    with FarPython(test_ssh.hosts["laptop"], PATIENCE_S) as notebook:
        notebook.run(start(test_ssh, gpus_per_node=1))
        assert all(left_on(test_ssh.hosts[name]) for name in ("n1", "n2"))
        hosts.Host.send_signal(notebook.process, signal.SIGKILL)
        require_nothing_left(test_ssh)


def test_a_kept_cluster_outlives_its_notebook_and_nbgpu_stop_ends_it_on_all_hosts(
    test_ssh: hosts.SecureShell,
) -> None:
    laptop = test_ssh.hosts["laptop"]
    with FarPython(laptop, PATIENCE_S) as first:
        first.run(start(test_ssh, keep=True))
        first.run("c.execute('kept = 7 * rank')")
        hosts.Host.send_signal(first.process, signal.SIGKILL)
    with FarPython(laptop, PATIENCE_S) as second:
        second.run("import nbgpu; c = nbgpu.attach()")
        assert second.value("c.pull('kept', rank=3)") == 21
        assert second.run(SUM) == RIGHT
        hosts.Host.send_signal(second.process, signal.SIGKILL)
    listed = laptop.run([sys.executable, "-m", "nbgpu.cli", "ps"]).stdout
    assert re.search(r"n1 CPU, n2 CPU +kept", listed), listed
    said = laptop.run([sys.executable, "-m", "nbgpu.cli", "stop", "--all"]).stdout
    assert "4 rank(s) on host(s) n1, n2" in said
    require_nothing_left(test_ssh)
