"""Steps within the notebook's own job: what srun is asked for, what is refused, and which GPUs a job has."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

import pytest

import nbgpu
from nbgpu.client.launchers.launcher import launcher_of, restored_launcher
from nbgpu.client.launchers.notebooks_job import NotebooksJob
from nbgpu.client.launchers.slurm import Allocation, Slurm
from nbgpu.client.launchers.slurm_launcher import SlurmLauncher
from nbgpu.client.launchers.slurm_steps import StepLauncher, StepRequest, step_script
from nbgpu.client.sweeps.starting import places_on_hosts
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine.slurm_job import OwnJob

DESCRIBED = (
    "JobId=7 ArrayJobId=7 JobName=a b UserId=u(1) JobState=RUNNING Reason=None RunTime=00:01:00 TimeLimit=00:10:00 "
    "NodeList=n1,n2,n3 JOB_GRES=gpu:a100:5 Nodes=n1 CPU_IDs=0-3 Mem=100 GRES=gpu:a100:2(IDX:0-1),gpu:1(IDX:2) "
    "Nodes=n2,n3 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0),shard:0 MinCPUsNode=1 {more}Power="
)


class DescribedSlurm(Slurm):
    """A Slurm whose scontrol has described a job."""

    said = ""

    def _run(
        self, command: Sequence[str], stdin: str = "", patience_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        if "hostnames" in command:
            return subprocess.CompletedProcess(command, 0, command[-1].replace(",", "\n"), "")
        return subprocess.CompletedProcess(command, 0, self.said, "")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> DescribedSlurm:
    monkeypatch.setattr(
        DescribedSlurm, "said", f"JobId=8 ArrayJobId=7 JobState=PENDING\n{DESCRIBED.format(more='')}"
    )
    return DescribedSlurm()


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A notebook on the first of two nodes, with one GPU on each."""
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURMD_NODENAME": "n1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_jobs_gpus_are_counted_by_node(slurm: DescribedSlurm) -> None:
    has = slurm.allocation("7")
    assert has == Allocation({"n1": 3, "n2": 1, "n3": 1})
    assert has.gpus_in_words == "GPUs: 3 on n1, 1 on n2, 1 on n3"
    assert has.first_nodes(1).gpus_in_words == "GPUs: 3 on n1"
    assert Allocation({"n1": 2, "n2": 2}).gpus_in_words == "2 GPUs on each node"
    assert Allocation({"n1": 0}).gpus_in_words == "Slurm counts no GPU of it"
    words = NotebooksJob(OwnJob("7", 3), slurm).describe()
    assert words == "this notebook's job 7 runs on n1, n2, n3; 9 min left; GPUs: 3 on n1, 1 on n2, 1 on n3"


def test_a_job_may_have_a_number_of_gpus_for_all_nodes(slurm: DescribedSlurm) -> None:
    DescribedSlurm.said = DESCRIBED.format(more="TresPerJob=gres:gpu:5 ")
    assert slurm.allocation("7").gpus_are_of_job


def steps(allocation: Allocation, **settings: object) -> list[dict[str, str]]:
    """The options of each srun of the script."""
    script = step_script(StepRequest("7", ".nbgpu-job-1", allocation, **settings), ["a program", "-x"])  # type: ignore[arg-type]
    lines = [line.removeprefix("exec ").removesuffix(" &") for line in script.splitlines() if "srun" in line]
    assert all(shlex.split(line)[-2:] == ["a program", "-x"] for line in lines)
    return [
        dict(word.removeprefix("--").partition("=")[::2] for word in shlex.split(line)[1:-2])
        for line in lines
    ]


def test_nodes_with_as_many_gpus_are_one_step() -> None:
    (step,) = steps(Allocation({"n1": 2, "n2": 2}))
    assert step == {
        "jobid": "7",
        "job-name": ".nbgpu-job-1",
        "overlap": "",
        "nodes": "2",
        "nodelist": "n1,n2",
        "ntasks": "2",
        "ntasks-per-node": "1",
        "cpu-bind": "none",
        "gres": "gpu:2",
        "input": "none",
        "kill-on-bad-exit": "0",
        "wait": "0",
    }


def test_each_node_gets_all_of_its_gpus() -> None:
    given = [
        (step["nodelist"], step.get("gres"), step.get("gpus"))
        for step in steps(Allocation({"n1": 2, "n2": 1, "n3": 2}))
    ]
    assert given == [("n1,n3", "gpu:2", None), ("n2", "gpu:1", None)]
    of_job = Allocation({"n1": 2, "n2": 2, "n3": 0}, gpus_are_of_job=True)
    given = [(step["nodelist"], step.get("gres"), step.get("gpus")) for step in steps(of_job)]
    assert given == [("n1", None, "2"), ("n2", None, "2"), ("n3", None, None)]
    assert "gres" not in steps(Allocation({"n1": 0}))[0]


def test_setup_and_a_loss_of_nodes() -> None:
    request = StepRequest("7", "s", Allocation({"n1": 0}), ["module load cuda"], outlives_nodes=True)
    lines = step_script(request, ["true"]).splitlines()
    assert lines[:2] == ["#!/bin/bash -l", "module load cuda"]
    assert " --no-kill true" in lines[2]
    assert lines[2].startswith("exec srun ")


@pytest.mark.usefixtures("in_job")
def test_the_job_is_taken_unless_another_one_is_asked_for() -> None:
    own = ClusterConfig.checked(launcher="slurm")
    assert (own.num_hosts, type(launcher_of(own))) == (2, StepLauncher)
    other = ClusterConfig.checked(launcher="slurm", launcher_options={"new_job": True, "partition": "gpu"})
    launcher = launcher_of(other)
    assert (other.num_hosts, type(launcher)) == (1, SlurmLauncher)
    assert "new_job" not in launcher._script()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="'new_job' takes no value"):
        nbgpu.Cluster(launcher="slurm", launcher_options="new_job=yes")
    assert ClusterConfig.checked(launcher="ssh", hosts="a").num_hosts == 1
    assert ClusterConfig.checked(launcher="hosts").num_hosts == 1


def test_a_kept_cluster_is_taken_over_as_it_was_started(in_job: pytest.MonkeyPatch) -> None:
    """Whoever attaches to it may be in the job, in another one, or in none."""
    config = ClusterConfig.checked(launcher="slurm", nodes=2)
    launcher = launcher_of(config)
    record = launcher.record()
    assert isinstance(restored_launcher(config, "9", {"folder": "/f"}), SlurmLauncher)
    in_job.delenv("SLURM_JOB_ID")
    again = restored_launcher(config, "7.1", record)
    assert isinstance(again, StepLauncher)
    assert (again.job, again.record()) == ("7.1", record)


@pytest.mark.usefixtures("in_job")
def test_what_the_job_decides_is_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        nbgpu.Cluster(
            launcher="slurm",
            nodes=3,
            gpus_per_node=2,
            on_host_lost="wait",
            launcher_options={"partition": "gpu", "foldr": "/f"},
        )
    lines = str(caught.value).splitlines()
    for line, words in zip(
        lines,
        (
            "launcher_options: 'partition' cannot be given, because this notebook is in job 7",
            "launcher_options: 'foldr' cannot be given",
            "nodes=3 is more than the 2 of job 7",
            "on_host_lost='wait' does not go with the nodes of job 7",
            "gpus_per_node=2 is more than the 1 that job 7 has on this node",
        ),
        strict=True,
    ):
        assert line.startswith(words)
        assert "launcher_options={'new_job': True}" in line
    assert "Did you mean folder?" in lines[1]


@pytest.mark.usefixtures("in_job")
def test_ranks_on_the_cpu_need_no_gpu_of_the_job() -> None:
    nbgpu.Cluster(launcher="slurm", gpus="none", gpus_per_node=4)


@pytest.mark.usefixtures("in_job")
def test_a_job_trains_one_trial_at_a_time() -> None:
    config = ClusterConfig.checked(launcher="slurm", gpus_per_node=1)
    assert places_on_hosts(config, None) == [config]
    with pytest.raises(ConfigError, match=r"parallel=2: this notebook is in Slurm's job 7.*'new_job': True"):
        places_on_hosts(config, 2)
    other = config.changed(launcher_options="new_job")
    assert len(places_on_hosts(other, 2)) == 2


def test_variables_are_saved_before_the_end_of_a_job_only(in_job: pytest.MonkeyPatch) -> None:
    nbgpu.Cluster(gpus="none", save_before_time_limit="saved")
    # With salloc on a login node.
    in_job.delenv("SLURMD_NODENAME")
    with pytest.raises(
        ConfigError, match="save_before_time_limit='saved' counts with launcher='slurm', or in"
    ):
        nbgpu.Cluster(gpus="none", save_before_time_limit="saved")


def test_the_time_left_is_known_without_slurms_programs(
    in_job: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    in_job.setattr("time.time", lambda: 1000.0)
    job = NotebooksJob(OwnJob("7", 2, "n1", end_s=1090.0))
    assert job.time_left_s() == 90.0
    assert NotebooksJob(OwnJob("7", 2, "n1")).time_left_s() is None
    assert job.state().startswith("this notebook is in Slurm's job 7: there is no scontrol on this host")
    with pytest.raises(ClusterError, match="there is no scontrol"):
        job.describe()
