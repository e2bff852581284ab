"""Exported files really run on two hosts, and give the notebook's losses to the last bit."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import hosts
import pytest
from hosts.namespaces import command_of, wait_until

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.errors import RunError
from nbgpu.protocol.records import Event, Sample
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as run_folders
from nbgpu.run_folder.reader import Reader

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 20,
    "steps": 40,
    "checkpoint_every": 5,
    "val_every": 0,
    "threads": 1,
}
ON_CPU = {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": 1, "cpus_per_node": 1}
LONG = SMALL | {"steps": 200}
"""For a run that is ended twice from outside before it is over."""
_PATIENCE_S = 600


@pytest.fixture(scope="module")
def notebook_run(cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs_dir = tmp_path_factory.mktemp("notebook")
    return cluster2.train("autoencoder", runs_dir=str(runs_dir), **SMALL).wait(_PATIENCE_S)


@pytest.fixture
def shared(test_slurm: hosts.Slurm) -> Path:
    """A folder that all hosts see."""
    folder = test_slurm.folder.parent / secrets.token_hex(4)
    folder.mkdir()
    return folder


def exported(run: Run, to: str, shared: Path, **settings: Any) -> Path:
    bin_folder = Path(sys.executable).parent
    made = run.export(
        to, **ON_CPU, **settings, out=str(shared / "job"), setup=f"export PATH={bin_folder}:$PATH"
    )
    settings_file = made.folder / "run.toml"
    ours = settings_file.read_text().replace(str(Path(run.config.runs_dir).absolute()), str(shared / "runs"))
    settings_file.write_text(ours)
    return made.folder


def newest_step(shared: Path) -> int:
    folders = list((shared / "runs").iterdir()) if (shared / "runs").exists() else []
    found = [path for folder in folders for path in checkpoint_files.checkpoints(folder)]
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def only_run(shared: Path) -> Path:
    (folder,) = (shared / "runs").iterdir()
    return folder


def is_finished(shared: Path) -> bool:
    try:
        return run_folders.outcome(only_run(shared), 0) == "finished"
    except (OSError, ValueError, RunError):
        return False


def losses(folder: Path) -> dict[tuple[int, int], float]:
    records, _ = Reader(folder, world_size=2, live=False).since()
    return {
        (r.rank, r.step): r.values["loss"] for r in records if isinstance(r, Sample) and "loss" in r.values
    }


def torchrun_on(host: hosts.Host, head: hosts.Host, job: Path) -> subprocess.Popen[Any]:
    environment = {"HEAD": head.address, "LOCAL_ADDR": host.address, "TMPDIR": "/tmp"}
    log = (job / f"{host.name}.txt").open("a")
    with log:
        return host.popen(["bash", str(job / "torchrun.sh")], environment=environment, stdout=log, stderr=log)


def test_torchrun_over_two_hosts_gives_the_notebooks_losses(
    notebook_run: Run, test_slurm: hosts.Slurm, shared: Path
) -> None:
    job = exported(notebook_run, "torchrun", shared)
    head = test_slurm.nodes[0]
    started = [torchrun_on(host, head, job) for host in test_slurm.nodes]
    try:
        for one in started:
            assert one.wait(_PATIENCE_S) == 0, "".join(path.read_text() for path in job.glob("*.txt"))
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert losses(only_run(shared)) == losses(notebook_run.folder)


def test_a_host_that_is_lost_leaves_the_other_with_the_same_samples_a_step(
    notebook_run: Run, test_slurm: hosts.Slurm, shared: Path
) -> None:
    job = exported(notebook_run, "torchrun", shared, min_nodes=1)
    head, other = test_slurm.nodes
    stays, goes = (torchrun_on(host, head, job) for host in (head, other))
    try:
        wait_until(lambda: newest_step(shared) >= 5, _PATIENCE_S, lambda: (job / "n1.txt").read_text())
        goes.kill()
        goes.wait()
        for pid in other.pids():
            if b"nbgpu.engine.train" in command_of(pid):
                os.kill(pid, 9)
        assert stays.wait(_PATIENCE_S) == 0, (job / "n1.txt").read_text()
    finally:
        for one in (stays, goes):
            one.kill()
            one.wait()
    info = run_folders.read_info(only_run(shared))
    assert (info.world_size, info.global_batch_size) == (1, notebook_run.info.global_batch_size)
    assert is_finished(shared)


@pytest.mark.release
def test_a_batch_job_goes_on_in_one_folder_when_time_is_up_and_when_it_is_preempted(
    cluster2: nbgpu.Cluster, test_slurm: hosts.Slurm, shared: Path, tmp_path: Path
) -> None:
    notebook_run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **LONG).wait(_PATIENCE_S)
    job = exported(notebook_run, "slurm", shared, time_limit="00:30:00")

    def output() -> str:
        return "".join(path.read_text() for path in job.glob("*.out")) + test_slurm.logs()

    def start_now() -> None:
        # Slurm lets a job that was queued again wait for two minutes.
        def is_waiting() -> bool:
            show = ["squeue", "--noheader", f"--jobs={number}", "--format=%T"]
            return test_slurm.run(show).stdout.strip() == "PENDING"

        wait_until(is_waiting, _PATIENCE_S, output)
        # Not at once: Slurm kills a job that starts within the second in which its last start was revoked.
        test_slurm.run(["scontrol", "update", f"JobId={number}", "StartTime=now+5"])

    submit = f"cd {job} && sbatch --parsable job.sbatch"
    number = test_slurm.run(["bash", "-c", submit]).stdout.strip()
    try:
        wait_until(lambda: newest_step(shared) >= 5, _PATIENCE_S, output)
        # As Slurm does before the time limit.
        test_slurm.run(["scancel", "--signal=USR1", number])
        wait_until(lambda: "the job queues again" in output(), _PATIENCE_S, output)
        stopped_at = newest_step(shared)
        assert stopped_at < LONG["steps"], "the run was over too early: this test shows nothing"
        start_now()
        wait_until(lambda: newest_step(shared) > stopped_at, _PATIENCE_S, output)
        urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        test_slurm.run(["sbatch", *urgent])
        start_now()
        wait_until(lambda: is_finished(shared), _PATIENCE_S, output)
        test_slurm.wait_until_idle()
    finally:
        test_slurm.cancel_all()
    folder = only_run(shared)
    assert losses(folder) == losses(notebook_run.folder)
    records, _ = Reader(folder, world_size=2, live=False).since()
    assert any(isinstance(r, Event) and "SIGUSR1" in r.text for r in records)
