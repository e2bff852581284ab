"""A notebook on the login host whose ranks are on the nodes of one Slurm job."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hosts
import pytest
from hosts import FarPython
from hosts.namespaces import command_of, wait_until
from rows import Measured, row

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 300
ON_SLURM = "CPU, gloo, 3 test hosts, Slurm"
SUM = "print(c.execute('t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t))'))"

RECIPE = '''
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from nbgpu.recipes.own import OwnRecipe


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "drawn": torch.rand(())}


class Slow(OwnRecipe):
    """Is there at once, and takes a tenth of a second for a step."""

    val_fraction: float = 0.0

    def dataset(self):
        return Numbers()

    def model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        time.sleep(0.1)
        return {"loss": (model(batch["x"]) - batch["drawn"]).square().mean()}
'''
ENDLESS = {"batch_size": 1, "lr": 1e-4, "steps": 100_000, "val_every": 0}


def refusal(notebook: FarPython, cell: str) -> str:
    """The error that a cell raises, with its name, after what the cell has printed."""
    return ": ".join(notebook.fails(cell))


def start(**settings: object) -> str:
    """The cell that starts a cluster."""
    given = {"nodes": 2, "gpus_per_node": 1, "gpus": "none", "launcher_options": {"time": "0:10:00"}}
    words = ", ".join(f"{name}={value!r}" for name, value in {**given, **settings}.items())
    return f"import nbgpu; c = nbgpu.Cluster(launcher='slurm', {words}); c.start()"


@pytest.fixture(scope="module")
def notebook(test_slurm: hosts.Slurm) -> Iterator[FarPython]:
    with FarPython(test_slurm.login, PATIENCE_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def recipe(test_slurm: hosts.Slurm) -> str:
    path = test_slurm.folder / "slow.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture(scope="module")
def saved_in(test_slurm: hosts.Slurm) -> Path:
    return test_slurm.folder / "saved"


@pytest.fixture(scope="module")
def started(test_slurm: hosts.Slurm, notebook: FarPython, saved_in: Path) -> Iterator[FarPython]:
    notebook.run(start(gpus="auto", save_before_time_limit=str(saved_in)))
    yield notebook
    notebook.run("c.stop()")


def jobs(slurm: hosts.Slurm) -> str:
    """The jobs that wait or run."""
    return slurm.run(["squeue", "--noheader", "--format=%i %T"]).stdout


def test_ranks_of_all_nodes_are_one_group(started: FarPython) -> None:
    said = started.run("print(c.execute('import platform; print(platform.node(), rank, local_rank)'))")
    assert said == "{0: 'n1 0 0\\n', 1: 'n2 1 0\\n'}\n"
    assert started.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"


def test_the_hosts_see_the_gpus_that_slurm_gives_them(started: FarPython, test_slurm: hosts.Slurm) -> None:
    """Slurm counts two on each node, and there are none: the ranks are on the CPU."""
    assert "gpu:1" in test_slurm.run(["squeue", "--noheader", "--format=%b"]).stdout
    for node in test_slurm.nodes:
        command = f"{sys.executable} -P -m nbgpu.engine.process.host".encode().split()
        (pid,) = [pid for pid in node.pids() if command_of(pid).split(b"\0")[:4] == command]
        assert b"CUDA_VISIBLE_DEVICES=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_the_status_says_how_long_the_job_has(started: FarPython) -> None:
    assert re.search(r" runs on n1, n2; \d+ min", started.run("print(c.status())").splitlines()[-1])


def test_the_panel_of_a_run_says_how_long_the_job_has(started: FarPython) -> None:
    assert 0 < started.value("c.parts.state.time_left_s") <= 600
    said = started.run(
        "from nbgpu.ui.run import wording; print(wording.time_left(c.parts.state.time_left_s))"
    )
    assert re.fullmatch(r"the job ends in \d+ min( \d+ s)?\n", said)


def test_other_processes_list_the_job_with_its_time(started: FarPython) -> None:
    listed = started.run("from nbgpu.client.host import ps; print(ps.table())")
    assert re.search(r"(?m)^[0-9a-f]+: job \d+ runs on n1, n2; \d+ min", listed), listed


def test_the_key_stands_in_no_command_line_environment_or_file_of_slurm(
    started: FarPython, test_slurm: hosts.Slurm
) -> None:
    key = started.value(
        "json.loads(c.join_file.read_text())['engine_connection']['curve_serverkey']"
    ).encode()
    for host in test_slurm.login, *test_slurm.nodes:
        for pid in host.pids():
            for what in ("cmdline", "environ"):
                assert key not in Path(f"/proc/{pid}/{what}").read_bytes()
    kept = [path for path in (test_slurm.folder / "state").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if key in path.read_bytes()]


@row(
    "a notebook's Slurm job comes close to its time limit in a step of a run; save_before_time_limit",
    "the run stops with a checkpoint and the variables are saved; both are said with the time that is left; the next job "
    "loads the variables",
    bound_s=10,
    runs_on=ON_SLURM,
)
def test_before_the_time_limit_a_run_stops_with_a_checkpoint_and_variables_are_saved(
    started: FarPython, test_slurm: hosts.Slurm, recipe: str, saved_in: Path, measured: Measured
) -> None:
    """The warning comes as soon as there is less time left than what it is given for."""
    shutil.rmtree(saved_in, ignore_errors=True)
    started.run("c.execute('x = rank + 10')")
    settings = ENDLESS | {"runs_dir": str(test_slurm.folder / "runs")}
    started.run(f"run = c.train({recipe!r}, **{settings!r})")
    started.run("import time\nwhile run.statuses()[0].step < 2: time.sleep(0.05)")
    started.run("import logging, io; said = io.StringIO(); h = logging.StreamHandler(said)")
    started.run("logging.getLogger('nbgpu.cluster').addHandler(h); c.parts.state.news.clear()")
    started.run(
        "from nbgpu.client.cluster import time_limit; from nbgpu.client.state import release; c.parts.state.time_limit.close()"
    )
    measured.fault_now()
    started.run(
        "usual_s = release.WARNING_BEFORE_END_S; release.WARNING_BEFORE_END_S = 3600; "
        "c.parts.state.time_limit = time_limit.watch_over(c.parts.state, c.parts.runs, c.parts.variables)"
    )
    started.run(f"run.wait({PATIENCE_S}, progress=False)")
    wait_until(saved_in.exists, PATIENCE_S, lambda: started.run("print(said.getvalue())"))
    # It is answered after the variables have been saved.
    said = started.run("print(said.getvalue())")
    measured.ended(said)
    started.run("release.WARNING_BEFORE_END_S = usual_s; logging.getLogger('nbgpu.cluster').removeHandler(h)")
    assert started.value("run.status") == "stopped"
    notes = started.value("[event.text for event in run.reader.since()[0] if hasattr(event, 'text')]")
    assert any(re.search(r"the job has \d+ min .*: stopped after this step", text) for text in notes), notes
    assert started.value("len(list((run.folder / 'checkpoints').iterdir()))") >= 1
    # As after a Stop, the result is there for the asking.
    assert started.value("[run.result(), run.can_work_out_result]") == [None, True]
    assert re.search(r"the job has \d+ min .*stops, and writes a checkpoint first", said), said
    assert re.search(rf"the job has \d+ min .*{re.escape(str(saved_in))}", said), said
    started.run("c.restart()")
    started.run(f"c.load({str(saved_in)!r})")
    assert started.value("c.pull('x', ranks='all')") == {"0": 10, "1": 11}


@row(
    "a notebook's Slurm job is ended by scancel between two cells",
    "it is seen at once; the next cell says that the job was cancelled, and that %nbgpu restart submits another one, which "
    "works",
    bound_s=3,
    runs_on=ON_SLURM,
)
def test_a_job_that_somebody_cancels_is_told_at_once(
    started: FarPython, test_slurm: hosts.Slurm, measured: Measured
) -> None:
    job = started.value("c.parts.state.pool.launcher.job")
    measured.fault_now()
    test_slurm.run(["scancel", job])
    started.run("import time\nwhile not c.ranks.gone(): time.sleep(0.02)")
    said = refusal(started, "c.execute('1')")
    measured.ended(said)
    # scancel ends the hosts one after the other, and the cell may come between them.
    lost = rf"hosts? n[12] .*lost.* Job {job} was cancelled.*\. %nbgpu restart submits another job"
    assert re.search(lost, said), said
    started.run("c.restart()")
    assert started.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"


def left_on(host: hosts.Host) -> str:
    """What a cluster has left on a node: folders, and processes of the hosts that the ranks have."""
    processes = "ps -eo args | grep [n]bgpu.engine"
    return host.run(["sh", "-c", f"ls -d /tmp/nbgpu-* | grep -v test; {processes}"], check=False).stdout


def require_nothing_left(test_slurm: hosts.Slurm) -> None:
    home = Path(test_slurm.environment["HOME"])

    def what_is_left() -> list[str]:
        on_nodes = [left_on(node) for node in test_slurm.nodes]
        return [each for each in [jobs(test_slurm), *on_nodes, *map(str, home.glob(".nbgpu-job-*"))] if each]

    wait_until(lambda: not what_is_left(), 60, what_is_left)


def test_stop_ends_the_job(started: FarPython, test_slurm: hosts.Slurm) -> None:
    started.run("c.stop()")
    require_nothing_left(test_slurm)


def test_the_doctor_measures_the_hosts_of_a_job(test_slurm: hosts.Slurm) -> None:
    settings = ["--nodes", "2", "--gpus-per-node", "1", "--gpus", "none"]
    command = [sys.executable, "-m", "nbgpu.cli", "doctor", "--json", "--launcher", "slurm", *settings]
    rate_bits_per_s = 200e6
    test_slurm.nodes[1].limit_link(rate_bits_per_s)
    try:
        done = test_slurm.run(command, timeout_s=PATIENCE_S)
    finally:
        test_slurm.nodes[1].limit_link(100e9)
    findings = json.loads(done.stdout)["findings"]
    assert {finding["verdict"] for finding in findings} == {"ok"}
    said = {finding["check"]: finding["told"] for finding in findings}
    assert "2 host(s) dialled in" in said["slurm"]
    assert said["host"].startswith("n2 has rank 1: ")
    (rate,) = re.findall(r"^n1 and n2: ([\d.]+) Gbit/s", said["link"])
    # The queue that limits the link lets a burst through. Without the limit it is a hundred times faster.
    assert 0.3 < float(rate) * 1e9 / rate_bits_per_s < 2
    require_nothing_left(test_slurm)


def test_the_doctor_tells_what_slurm_refuses(test_slurm: hosts.Slurm) -> None:
    options = ["--launcher=slurm", "--launcher-options", "partition=gpuu"]
    done = test_slurm.run([sys.executable, "-m", "nbgpu.cli", "doctor", *options], check=False)
    assert done.returncode == 1
    assert re.search("fail +slurm .*invalid partition", done.stdout), done.stdout


def test_a_terminal_ends_the_job(notebook: FarPython, test_slurm: hosts.Slurm) -> None:
    notebook.run(start())
    stop = [sys.executable, "-m", "nbgpu.cli", "stop", "--all"]
    said = test_slurm.run(stop).stdout
    assert re.search(r"ended cluster .*: job \d+, process", said), said
    wait_until(lambda: not jobs(test_slurm), PATIENCE_S, lambda: jobs(test_slurm))
    notebook.run("c.stop()")
    require_nothing_left(test_slurm)


@row(
    "the notebook of a cluster in a Slurm job is killed",
    "the job ends; no process and no folder is left on any node",
    bound_s=10,
    runs_on=ON_SLURM,
)
def test_the_notebooks_end_ends_the_job(test_slurm: hosts.Slurm, measured: Measured) -> None:
    with FarPython(test_slurm.login, PATIENCE_S) as notebook:
        notebook.run(start())
        assert all(left_on(node) for node in test_slurm.nodes)
        measured.fault_now()
        hosts.Host.send_signal(notebook.process, signal.SIGKILL)
        require_nothing_left(test_slurm)
        measured.ended()


def end_without_stop(notebook: FarPython) -> None:
    """End the process of a notebook in good order, as a server does that shuts a kernel down."""
    notebook.process.stdin.close()
    notebook.process.wait(PATIENCE_S)


def listed_by_a_terminal(slurm: hosts.Slurm) -> str:
    return slurm.run([sys.executable, "-m", "nbgpu.cli", "ps"]).stdout


def test_a_kept_cluster_outlives_its_notebooks_and_nbgpu_stop_ends_its_job(test_slurm: hosts.Slurm) -> None:
    with FarPython(test_slurm.login, PATIENCE_S) as first:
        first.run(start(keep=True))
        job = first.value("c.parts.state.pool.launcher.job")
        first.run("c.execute('kept = 7 * rank')")
        pids = first.value("c.pids")
        end_without_stop(first)
    with FarPython(test_slurm.login, PATIENCE_S) as second:
        second.run("import nbgpu; c = nbgpu.attach()")
        assert second.value("c.pids") == pids
        assert second.value("c.pull('kept', ranks='all')") == {"0": 0, "1": 7}
        assert second.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
        assert re.search(
            rf"job {job} runs on n1, n2; \d+ min", second.run("print(c.status())").splitlines()[-1]
        )
        hosts.Host.send_signal(second.process, signal.SIGKILL)
    listed = listed_by_a_terminal(test_slurm)
    assert re.search(r"n1 CPU, n2 CPU +kept", listed), listed
    assert re.search(rf"job {job} runs on n1, n2; \d+ min", listed), listed
    said = test_slurm.run([sys.executable, "-m", "nbgpu.cli", "stop", "--all"]).stdout
    assert re.search(rf"ended cluster .*: job {job}, process", said), said
    require_nothing_left(test_slurm)
    assert listed_by_a_terminal(test_slurm) == "no clusters\n"


def test_who_attaches_to_a_kept_cluster_can_stop_it(test_slurm: hosts.Slurm) -> None:
    with FarPython(test_slurm.login, PATIENCE_S) as first:
        first.run(start(keep=True))
        hosts.Host.send_signal(first.process, signal.SIGKILL)
    with FarPython(test_slurm.login, PATIENCE_S) as second:
        second.run("import nbgpu; c = nbgpu.attach(); c.stop()")
        require_nothing_left(test_slurm)
        assert not left_on(test_slurm.login)


def test_a_kept_job_that_somebody_cancels_is_told_to_who_attaches(test_slurm: hosts.Slurm) -> None:
    with FarPython(test_slurm.login, PATIENCE_S) as first:
        first.run(start(keep=True))
        job = first.value("c.parts.state.pool.launcher.job")
        end_without_stop(first)
    test_slurm.run(["scancel", job])
    require_nothing_left(test_slurm)
    assert f"job {job} was cancelled" in listed_by_a_terminal(test_slurm)
    with FarPython(test_slurm.login, PATIENCE_S) as second:
        second.run("import nbgpu; c = nbgpu.attach()")
        said = refusal(second, "c.execute('1')")
        # scancel ends the hosts one after the other, and the cell may come between them.
        lost = rf"hosts? n[12] .*lost.* Job {job} was cancelled.*\. %nbgpu restart submits another job"
        assert re.search(lost, said), said
        second.run("c.restart()")
        assert second.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
        second.run("c.stop()")
    require_nothing_left(test_slurm)
    assert listed_by_a_terminal(test_slurm) == "no clusters\n"


def test_nbgpu_stop_removes_the_join_file_of_a_kept_job_whose_hosts_were_killed(
    test_slurm: hosts.Slurm,
) -> None:
    """Hosts that end in good order remove it themselves."""
    home = Path(test_slurm.environment["HOME"])
    with FarPython(test_slurm.login, PATIENCE_S) as first:
        first.run(start(keep=True))
        end_without_stop(first)
    for node in test_slurm.nodes:
        for pid in [pid for pid in node.pids() if b"nbgpu.engine" in command_of(pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert list(home.glob(".nbgpu-job-*/join.json"))
    test_slurm.run([sys.executable, "-m", "nbgpu.cli", "stop", "--all"])
    assert not list(home.glob(".nbgpu-job-*"))
    for node in test_slurm.nodes:
        # The fork server, which removes its host's folder at the end, was killed as well.
        node.run(["sh", "-c", "rm -rf /tmp/nbgpu-[0-9a-f]*"])
    require_nothing_left(test_slurm)


def test_a_job_whose_time_is_up_is_told(notebook: FarPython, test_slurm: hosts.Slurm) -> None:
    """Its end is moved, to when Slurm next looks for such jobs, which it does twice a minute."""
    notebook.run(start())
    job = notebook.value("c.parts.state.pool.launcher.job")
    test_slurm.run(["scontrol", "update", f"JobId={job}", "EndTime=now+1"])
    # The nodes end their parts one after the other.
    notebook.run("import time\nwhile len(c.ranks.gone()) < 2: time.sleep(0.05)")
    said = refusal(notebook, "c.execute('1')")
    ended = rf"hosts n1 and n2 are lost\. Job {job} was ended by its time limit of .*\. %nbgpu restart submits another job"
    assert re.search(ended, said), said
    notebook.run("c.stop()")
    require_nothing_left(test_slurm)


def test_a_job_goes_on_with_the_nodes_that_are_left(notebook: FarPython, test_slurm: hosts.Slurm) -> None:
    notebook.run(start())
    job = notebook.value("c.parts.state.pool.launcher.job")
    notebook.run("c.execute('kept = 7 * rank')")
    test_slurm.hosts["n2"].power_off()
    notebook.run("import time\nwhile not c.ranks.gone(): time.sleep(0.05)")
    said = refusal(notebook, "c.execute('1')")
    assert "host n2 is lost, and the cluster goes on with 1 rank" in said
    alone = "print(c.execute('t = torch.ones(1); dist.all_reduce(t); print(int(t), kept)'))"
    assert notebook.run(alone) == "{0: '1 0\\n'}\n"
    # Slurm learns of it, too, and lets the job go on.
    down = ["sinfo", "--noheader", "--nodes=n2", "--format=%T"]
    wait_until(lambda: "down" in test_slurm.run(down).stdout, 90, test_slurm.logs)
    assert f"{job} RUNNING" in jobs(test_slurm)
    assert notebook.run(alone) == "{0: '1 0\\n'}\n"
    notebook.run("c.stop()")
    test_slurm.start_node(test_slurm.hosts.power_on("n2"))
    test_slurm.wait_until_idle(90)


@row(
    "a notebook's Slurm job is preempted in a step of a run, and requeued; on_host_lost='wait'",
    "the run waits for the job's next start and goes on from its newest checkpoint; losses equal those of an unhurt run",
    bound_s=None,
    runs_on=ON_SLURM,
)
def test_a_run_goes_on_after_its_job_was_preempted(
    notebook: FarPython, test_slurm: hosts.Slurm, recipe: str
) -> None:
    notebook.run(start(on_host_lost="wait", host_patience_s=300, launcher_options={"requeue": True}))
    job = notebook.value("c.parts.state.pool.launcher.job")
    settings = ENDLESS | {"checkpoint_every": 5, "runs_dir": str(test_slurm.folder / "runs")}
    notebook.run(f"""
import time
def trained_until(run, step):
    while run.statuses()[0].step < step:
        time.sleep(0.02)
run = c.train({recipe!r}, **{settings!r})
trained_until(run, 12)
""")
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    test_slurm.run(["sbatch", *urgent])
    wait_until(lambda: f"{job} PENDING" in jobs(test_slurm), 60, test_slurm.logs)
    step = notebook.value("max(each.step for each in run.statuses())")
    notebook.run("while 'waits to start again, after it was requeued once' not in run.hang: time.sleep(0.05)")
    # Slurm lets a job that was requeued wait for two minutes. It is not started at once, because Slurm kills
    # a job that starts within the second in which its last start was revoked.
    test_slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"])
    notebook.run(f"trained_until(run, {step} + 10); run.stop(); run.wait({PATIENCE_S}, progress=False)")
    assert "Training goes on after step" in notebook.value("' '.join(run.notes())")
    notebook.run(f"unhurt = c.train({recipe!r}, **{settings!r}); trained_until(unhurt, {step} + 10)")
    notebook.run(f"unhurt.stop(); unhurt.wait({PATIENCE_S}, progress=False)")
    notebook.run(f"""
import pandas as pd
def losses(run):
    table = pd.read_csv(run.folder / 'metrics.csv', usecols=['step', 'rank', 'loss']).dropna()
    return table[table.step <= {step} + 10].pivot(index='step', columns='rank', values='loss')
""")
    assert notebook.value("losses(run).shape") == [step + 10, 2]
    notebook.run("unequal = losses(run).compare(losses(unhurt))")
    assert notebook.value("len(unequal)") == 0, notebook.run("print(unequal.to_string())")
    assert notebook.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
    notebook.run("c.stop()")
    require_nothing_left(test_slurm)
    assert not list(Path(test_slurm.environment["HOME"]).glob(".nbgpu-*"))


def test_a_job_that_waits_to_start_again_leaves_nothing_when_its_notebook_has_ended(
    test_slurm: hosts.Slurm,
) -> None:
    with FarPython(test_slurm.login, PATIENCE_S) as notebook:
        notebook.run(start(on_host_lost="wait", launcher_options={"requeue": True}))
        job = notebook.value("c.parts.state.pool.launcher.job")
        test_slurm.run(["scontrol", "requeue", job])
        wait_until(lambda: f"{job} PENDING" in jobs(test_slurm), 60, test_slurm.logs)
        hosts.Host.send_signal(notebook.process, signal.SIGKILL)
    test_slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"])
    require_nothing_left(test_slurm)
    assert not list(Path(test_slurm.environment["HOME"]).glob(".nbgpu-*"))


PROFILE = """c = get_config()
c.Cluster.engine_launcher_class = "slurm"
c.SlurmEngineSetLauncher.batch_template = '''#!/bin/sh
#SBATCH --nodes={n} --ntasks-per-node=1 --time=0:10:00 --output=/dev/null
srun {program_and_args}
'''
"""


def test_a_profile_of_ipyparallel_starts_the_hosts(notebook: FarPython, test_slurm: hosts.Slurm) -> None:
    profile = test_slurm.folder / "ipython" / "profile_site"
    profile.mkdir(parents=True)
    (profile / "ipcluster_config.py").write_text(PROFILE)
    notebook.run(f"import os, nbgpu; os.environ['IPYTHONDIR'] = {str(profile.parent)!r}")
    address = test_slurm.login.address
    settings = f"ipython_profile='site', nodes=2, gpus_per_node=1, gpus='none', interface={address!r}"
    said = notebook.run(f"c = nbgpu.Cluster(launcher='hosts', {settings}).start()")
    assert re.search(r"SlurmEngineSetLauncher of the profile site starts 2 host\(s\): job \d+", said), said
    assert notebook.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
    notebook.run("c.stop()")
    require_nothing_left(test_slurm)
    assert not list(Path(test_slurm.environment["HOME"]).glob(".nbgpu-*"))


def test_a_job_that_waits_says_why_and_stop_cancels_it(notebook: FarPython, test_slurm: hosts.Slurm) -> None:
    busy = [
        "sbatch",
        "--output=/dev/null",
        "--nodes=2",
        "--exclusive",
        "--time=0:20:00",
        "--wrap",
        "srun sleep 600",
    ]
    test_slurm.run(busy)
    wait_until(lambda: "RUNNING" in jobs(test_slurm), PATIENCE_S, test_slurm.logs)
    notebook.send(start(launcher_options={"exclusive": True}))
    wait_until(lambda: "PENDING" in jobs(test_slurm), PATIENCE_S, lambda: jobs(test_slurm))
    reason = ["squeue", "--noheader", "--states=PENDING", "--format=%r"]
    wait_until(
        lambda: "Resources" in test_slurm.run(reason).stdout,
        PATIENCE_S,
        lambda: test_slurm.run(reason).stdout,
    )
    time.sleep(3)  # nbgpu asks every two seconds
    notebook.press_stop()
    failed, said = notebook.answer()
    assert failed == "KeyboardInterrupt"
    assert re.search(r"job \d+ waits: no nodes are free for it \(Resources\)", said), said
    wait_until(lambda: "PENDING" not in jobs(test_slurm), PATIENCE_S, lambda: jobs(test_slurm))
    test_slurm.cancel_all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"launcher_options": {"partition": "gpuu"}}, "did not take the job: .*invalid partition"),
        (
            {"launcher_options": {"python": "/opt/none/python"}},
            r"(?s)(?=.*n1: task 0: Exited).*/opt/none/python: No such file",
        ),
        (
            {"interface": "lo"},
            r"(?s)n1: the cluster's controller does not answer at 127\.0\.0\.1:\d+, interface lo",
        ),
        ({"launcher_options": {"nodes": 3}}, "^ConfigError: .*'nodes' cannot be given"),
    ],
)
def test_a_job_that_cannot_be_says_why(
    notebook: FarPython, test_slurm: hosts.Slurm, settings: dict[str, object], words: str
) -> None:
    said = refusal(notebook, start(**settings))
    assert re.search(words, said), said
    test_slurm.wait_until_idle()
