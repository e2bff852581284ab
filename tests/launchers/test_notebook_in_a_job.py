"""A notebook that is in a Slurm job itself, on the first of its nodes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hosts
import pytest
from hosts import BatchStep, FarPython
from hosts.namespaces import wait_until
from made_runs import RECIPE
from rows import Measured, row

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 300
SUM = "print(c.execute('t = torch.ones(1) * (rank + 1); dist.all_reduce(t); print(int(t))'))"
WHERE = "print(c.execute('import platform; print(platform.node(), rank, local_rank)'))"
OPTIONS = ["--nodes=2", "--ntasks-per-node=1", "--time=0:10:00"]


@pytest.fixture(scope="module")
def place(test_slurm: hosts.Slurm) -> Iterator[BatchStep]:
    made = BatchStep(test_slurm, [*OPTIONS, "--gpus-per-node=1"])
    yield made
    made.end()
    test_slurm.wait_until_idle()


@pytest.fixture(scope="module")
def notebook(place: BatchStep) -> Iterator[FarPython]:
    with FarPython(place, PATIENCE_S) as opened:
        opened.run("import nbgpu")
        yield opened


def start(**settings: object) -> str:
    """The cell that starts a cluster."""
    given = {"launcher": "slurm", "gpus_per_node": 1, **settings}
    return f"c = nbgpu.Cluster({', '.join(f'{name}={value!r}' for name, value in given.items())}); c.start()"


def time_left_s(notebook: FarPython) -> float:
    """The cluster's time, once Slurm has been asked for it."""
    notebook.run("import time\nwhile c.parts.state.time_left_s is None: time.sleep(0.02)")
    left_s: float = notebook.value("c.parts.state.time_left_s")
    return left_s


def jobs(slurm: hosts.Slurm) -> list[str]:
    """The jobs that wait or run."""
    return slurm.run(["squeue", "--noheader", "--format=%i %T"]).stdout.splitlines()


def steps(slurm: hosts.Slurm) -> list[str]:
    """The names of the steps that were started by hand."""
    names = slurm.run(["squeue", "--noheader", "--steps", "--format=%j"]).stdout.split()
    return [name for name in names if name.startswith(".nbgpu-job-")]


def visible_gpus(slurm: hosts.Slurm) -> list[str]:
    """The GPUs that the host's process on each node sees. Slurm counts two on each, and there are none."""
    command = f"{sys.executable} -P -m nbgpu.engine.process.host".encode().split()
    found = []
    for node in slurm.nodes:
        for process in (Path(f"/proc/{pid}") for pid in node.pids()):
            with suppress(OSError):  # it has ended meanwhile
                if (process / "cmdline").read_bytes().split(b"\0")[:4] == command:
                    variables = (process / "environ").read_bytes().decode().split("\0")
                    found += [
                        words.partition("=")[2] for words in variables if words.startswith("CUDA_VISIBLE_")
                    ]
    return found


def require_the_job_alone(slurm: hosts.Slurm, job: str) -> None:
    """Wait until nothing is left of a cluster but the job in which its notebook is."""
    folders = Path(slurm.environment["HOME"])

    def what_is_left() -> list[str]:
        on_nodes = [
            node.run(
                ["sh", "-c", "ls -d /tmp/nbgpu-* | grep -v test; ps -eo args | grep [n]bgpu.engine"],
                check=False,
            ).stdout
            for node in slurm.nodes
        ]
        others = [each for each in jobs(slurm) if each != f"{job} RUNNING"]
        left = [*others, *steps(slurm), *on_nodes, *map(str, folders.glob(".nbgpu-job-*"))]
        return [each for each in left if each]

    wait_until(lambda: not what_is_left(), 60, what_is_left)
    assert jobs(slurm) == [f"{job} RUNNING"]


def test_the_ranks_are_on_the_nodes_of_the_job_and_stop_leaves_it(
    notebook: FarPython, place: BatchStep, test_slurm: hosts.Slurm
) -> None:
    said = notebook.run(start())
    assert f"this notebook's job {place.job} runs on n1, n2; " in said
    assert notebook.run(WHERE) == "{0: 'n1 0 0\\n', 1: 'n2 1 0\\n'}\n"
    assert notebook.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
    assert jobs(test_slurm) == [f"{place.job} RUNNING"]
    assert len(steps(test_slurm)) == 1
    assert visible_gpus(test_slurm) == ["0", "0"]
    last = notebook.run("print(c.status())").splitlines()[-1]
    assert re.search(rf"^this notebook's job {place.job} runs on n1, n2; \d min", last), last
    assert 0 < time_left_s(notebook) <= 600
    notebook.run("c.restart()")
    assert notebook.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
    notebook.run("c.stop()")
    require_the_job_alone(test_slurm, place.job)


def test_a_terminal_ends_the_steps_and_not_the_job(
    notebook: FarPython, place: BatchStep, test_slurm: hosts.Slurm
) -> None:
    notebook.run(start(nodes=1, gpus="none"))
    assert notebook.run(WHERE) == "{0: 'n1 0 0\\n'}\n"
    node = test_slurm.hosts["n1"]
    listed = node.run([sys.executable, "-m", "nbgpu.cli", "ps"]).stdout
    assert f"job {place.job} runs on n1, n2; " in listed
    said = node.run([sys.executable, "-m", "nbgpu.cli", "stop", "--all"]).stdout
    assert re.search(rf"ended cluster .*: step {place.job}\.\d+, process", said), said
    notebook.run("c.stop()")
    require_the_job_alone(test_slurm, place.job)


def test_another_job_is_submitted_where_that_is_asked_for(
    notebook: FarPython, place: BatchStep, test_slurm: hosts.Slurm
) -> None:
    notebook.run(start(nodes=2, launcher_options={"new_job": True, "time": "0:20:00"}))
    own = f"{place.job} RUNNING"
    assert [job.endswith(" RUNNING") for job in jobs(test_slurm) if job != own] == [True]
    assert notebook.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
    # The notebook's own job ends first, and the ranks with it.
    assert time_left_s(notebook) <= 600
    notebook.run("c.stop()")
    require_the_job_alone(test_slurm, place.job)


def test_what_the_job_decides_is_refused_all_at_once(notebook: FarPython, place: BatchStep) -> None:
    options = {"partition": "debug", "time": "1:00:00"}
    name, said = notebook.fails(
        start(nodes=3, gpus_per_node=2, on_host_lost="wait", launcher_options=options)
    )
    assert name == "ConfigError"
    lines = said.splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "launcher_options:",
        "launcher_options:",
        "nodes=3",
        "on_host_lost='wait'",
        "gpus_per_node=2",
    ]
    assert all(f"job {place.job}" in line and "'new_job': True" in line for line in lines), said


def test_the_doctor_says_what_the_job_has(
    notebook: FarPython, place: BatchStep, test_slurm: hosts.Slurm
) -> None:
    command = [
        sys.executable,
        "-m",
        "nbgpu.cli",
        "doctor",
        "--json",
        "--launcher",
        "slurm",
        "--gpus-per-node",
        "1",
    ]
    notebook.run(f"import subprocess; done = subprocess.run({command!r}, capture_output=True, text=True)")
    findings = json.loads(notebook.value("done.stdout"))["findings"]
    assert {finding["verdict"] for finding in findings} == {"ok"}
    said = {finding["check"]: finding["told"] for finding in findings}
    job = rf"this notebook's job {place.job} runs on n1, n2; .* left; 1 GPU on each node\. launcher='slurm' takes"
    assert re.match(job, said["job"]), said
    assert "2 host(s) dialled in" in said["slurm"]
    require_the_job_alone(test_slurm, place.job)


@row(
    "a notebook in a Slurm job, with its ranks beside it (launcher='local'), comes close to the job's time limit in a step "
    "of a run; save_before_time_limit",
    "the run stops with a checkpoint and the variables are saved; both are said with the time that is left",
    bound_s=10,
    runs_on="CPU, gloo, 3 test hosts, Slurm",
)
def test_before_the_jobs_limit_ranks_beside_the_notebook_are_saved(
    notebook: FarPython, place: BatchStep, test_slurm: hosts.Slurm, measured: Measured
) -> None:
    """The warning comes as soon as there is less time left than what it is given for."""
    saved_in = test_slurm.folder / "saved"
    shutil.rmtree(saved_in, ignore_errors=True)
    recipe = test_slurm.folder / "slow.py"
    recipe.write_text(RECIPE)
    notebook.run(
        f"c = nbgpu.Cluster(gpus='none', save_before_time_limit={str(saved_in)!r}); c.start(); c.execute('x = rank + 10')"
    )
    assert 0 < time_left_s(notebook) <= 600
    assert f"this notebook's job {place.job} runs on n1, n2; " in notebook.run("print(c.status())")
    settings = {
        "steps": 100_000,
        "val_every": 0,
        "compute_s": 0.1,
        "work_out_result": False,
        "runs_dir": str(test_slurm.folder / "runs"),
    }
    notebook.run(f"run = c.train({str(recipe)!r}, **{settings!r})")
    notebook.run("while run.statuses()[0].step < 2: time.sleep(0.05)")
    panel = "from nbgpu.ui.run import wording; print(wording.time_left(run.time_left_s))"
    assert re.fullmatch(r"the job ends in \d+ min( \d+ s)?\n", notebook.run(panel))
    notebook.run(
        "from nbgpu.client.cluster import time_limit; from nbgpu.client.state import release; c.parts.state.time_limit.close()"
    )
    measured.fault_now()
    notebook.run(
        "usual_s = release.WARNING_BEFORE_END_S; release.WARNING_BEFORE_END_S = 3600; "
        "c.parts.state.time_limit = time_limit.watch_over(c.parts.state, c.parts.runs, c.parts.variables)"
    )
    notebook.run(f"run.wait({PATIENCE_S}, progress=False)")
    wait_until(saved_in.exists, PATIENCE_S, lambda: "the variables were not saved")
    # It is answered after the variables have been saved.
    said = notebook.value("run.status")
    measured.ended()
    assert said == "stopped"
    notebook.run("release.WARNING_BEFORE_END_S = usual_s")
    notes = notebook.value("[event.text for event in run.reader.since()[0] if hasattr(event, 'text')]")
    assert any(re.search(r"the job has \d+ min .*: stopped after this step", text) for text in notes), notes
    assert notebook.value("len(list((run.folder / 'checkpoints').iterdir()))") >= 1
    notebook.run("c.stop(); c = nbgpu.Cluster(gpus='none').start()")
    notebook.run(f"c.load({str(saved_in)!r})")
    assert notebook.value("c.pull('x', ranks='all')") == {"0": 10, "1": 11}
    notebook.run("c.stop()")
    require_the_job_alone(test_slurm, place.job)


def test_a_notebook_in_a_step_of_an_exclusive_job(
    notebook: FarPython, place: BatchStep, test_slurm: hosts.Slurm
) -> None:
    """That is how JupyterHub's batchspawner starts it. The step holds what the job has, and Slurm gives it
    none of the GPUs."""
    with notebook:
        place.end()
    test_slurm.wait_until_idle()
    in_step = BatchStep(test_slurm, [*OPTIONS, "--exclusive"], through=["srun", "--nodes=1", "--ntasks=1"])
    with FarPython(in_step, PATIENCE_S) as opened:
        opened.run("import nbgpu")
        opened.run(start())
        assert opened.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
        assert visible_gpus(test_slurm) == ["0,1", "0,1"]
        opened.run("c.stop()")
        require_the_job_alone(test_slurm, in_step.job)
    in_step.end()


@row(
    "the kernel of a notebook in a Slurm job, whose ranks are on the job's nodes, is killed",
    "its steps end, the job goes on; no process and no folder of the cluster is left on any node",
    bound_s=10,
    runs_on="CPU, gloo, 3 test hosts, Slurm",
)
def test_a_kernel_that_ends_leaves_the_job_and_a_kept_cluster(
    test_slurm: hosts.Slurm, measured: Measured
) -> None:
    """The job's own program is the server of the notebooks, which starts another kernel. It has a number of
    GPUs for all nodes together, two on one and one on the other, so that each node has a step."""
    job = test_slurm.run(
        ["sbatch", "--parsable", "--output=/dev/null", *OPTIONS, "--gpus=3", "--wrap=sleep 600"]
    ).stdout.strip()
    wait_until(lambda: jobs(test_slurm) == [f"{job} RUNNING"], PATIENCE_S, test_slurm.logs)
    node = test_slurm.hosts["n1"]
    of_job = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    before = dict(node.environment)
    node.environment |= of_job
    try:
        with FarPython(node, PATIENCE_S) as first:
            first.run(f"import nbgpu; {start(keep=True)}; c.execute('kept = 7 * rank')")
            assert len(steps(test_slurm)) == 2
            assert visible_gpus(test_slurm) == ["0,1", "0"]
            hosts.Host.send_signal(first.process, signal.SIGKILL)
        with FarPython(node, PATIENCE_S) as second:
            second.run("import nbgpu; c = nbgpu.attach()")
            assert second.value("c.pull('kept', ranks='all')") == {"0": 0, "1": 7}
            assert second.run(SUM) == "{0: '3\\n', 1: '3\\n'}\n"
            second.run("c.stop()")
            require_the_job_alone(test_slurm, job)
            second.run(start())
            measured.fault_now()
            hosts.Host.send_signal(second.process, signal.SIGKILL)
        require_the_job_alone(test_slurm, job)
        measured.ended()
    finally:
        node.environment.clear()
        node.environment |= before
        test_slurm.cancel_all()
