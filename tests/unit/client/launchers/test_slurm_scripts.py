"""The batch script: what stands in it, what may be asked for, and that Slurm takes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nbgpu.client.launchers.slurm import Slurm
from nbgpu.client.launchers.slurm_launcher import SlurmLauncher
from nbgpu.client.launchers.slurm_script import SlurmRequest, batch_script
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError

REQUEST = SlurmRequest(
    nodes=2,
    name="nbgpu",
    output=Path("/runs/job {1}.log"),
    gpus_per_node=4,
    options={
        "partition": "gpu",
        "time": "2:00:00",
        "exclusive": True,
        "mail_user": False,
        "comment": 'a "b" c',
    },
    setup=["module load cuda", "export A=${HOME}"],
)


def test_the_script_asks_for_what_was_asked_for() -> None:
    assert batch_script(REQUEST, [sys.executable, "-m", "a module"]).splitlines() == [
        "#!/bin/bash -l",
        "#SBATCH --job-name=nbgpu",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        '#SBATCH --output="/runs/job {1}.log"',
        "#SBATCH --open-mode=append",
        "#SBATCH --no-requeue",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=2:00:00",
        "#SBATCH --exclusive",
        '#SBATCH --comment="a \\"b\\" c"',
        "module load cuda",
        "export A=${HOME}",
        "exec srun --kill-on-bad-exit=0 --wait=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
        f"  {sys.executable} -m 'a module'",
    ]


def test_a_job_is_requeued_only_where_that_is_asked_for() -> None:
    request = SlurmRequest(1, "nbgpu", Path("/o"), options={"requeue": True})
    script = batch_script(request, ["true"])
    assert "#SBATCH --requeue" in script
    assert "no-requeue" not in script
    assert "--gpus-per-node" not in batch_script(request, ["true"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 3}, "'nodes' cannot be given, because it is the setting `nodes`"),
        ({"--ntasks_per_node": 3}, "'--ntasks_per_node' cannot be given, because each node has one task"),
        ({"N": 3}, "'N' cannot be given"),
        ({"clusters": "b"}, "'clusters' cannot be given, because only the Slurm of this host"),
        ({"M": "b"}, "'M' cannot be given"),
        ({"time 3\n": 3}, "is not the name of an option of sbatch"),
        ({"time": "1\n#SBATCH --uid=0"}, "is more than one line"),
    ],
)
def test_what_is_not_the_users_to_ask_for_is_refused(
    options: dict[str, str | int | bool], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_script(SlurmRequest(1, "nbgpu", Path("/o"), options=options), ["true"])


@pytest.mark.parametrize("options", ["partition=gpu", "--partition=gpu", "p=gpu", "-p=gpu"])
def test_the_interface_leads_to_the_nodes_of_the_partition(
    monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    asked = []

    def node_addresses(_: Slurm, partition: str) -> list[str]:
        asked.append(partition)
        return ["127.0.0.1"]

    monkeypatch.setattr(Slurm, "node_addresses", node_addresses)
    SlurmLauncher(ClusterConfig.checked(launcher="slurm", nodes=1, launcher_options=options)).listen_at()
    assert asked == ["gpu"]


def test_setup_gives_no_options() -> None:
    with pytest.raises(ConfigError, match="would be read as an option"):
        batch_script(SlurmRequest(1, "nbgpu", Path("/o"), setup=["#SBATCH --nodes=9"]), ["true"])
