"""What a process is told of the Slurm job in which it runs, by variables as Slurm 22.05 sets them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from nbgpu.machine import slurm_job
from nbgpu.machine.slurm_job import OwnJob, Restriction, own_job, restriction

IN_A_BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURMD_NODENAME": "n1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_GPUS": "0,1",
}
IN_A_STEP = IN_A_BATCH_SCRIPT | {"SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "1"}
IN_SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        (IN_A_BATCH_SCRIPT, OwnJob("7", 2, "n1", 2)),
        (IN_A_STEP, OwnJob("7", 2, "n1", 2)),
        (IN_SALLOC, OwnJob("7", 2)),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}, OwnJob("7", 1, end_s=1_700_000_000)),
        ({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_NUM_NODES": "2"}, None),
        ({"SLURM_JOB_ID": "", "SLURM_NNODES": "2"}, None),
    ],
)
def test_the_job_is_that_of_the_variables(variables: dict[str, str], job: OwnJob | None) -> None:
    assert own_job(variables) == job


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without Slurm's variables and CUDA's, and without Slurm's programs."""
    slurm_job._allocates_gpus.cache_clear()
    for name in ("CUDA_VISIBLE_DEVICES", *IN_A_STEP):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nothing")
    return monkeypatch


def within(environment: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "num_gpus", "expected"),
    [
        ({}, 4, None),
        ({"SLURM_JOB_GPUS": "0,1"}, 4, None),  # in no job
        (IN_SALLOC, 4, None),  # on a login node, whose GPUs are not the job's
        (IN_A_BATCH_SCRIPT, 4, Restriction("0,1", "SLURM_JOB_GPUS=0,1")),
        (IN_A_BATCH_SCRIPT, 2, None),  # the driver lists the job's alone
        (IN_A_STEP, 4, Restriction("1", "SLURM_STEP_GPUS=1")),
        (IN_A_STEP | {"CUDA_VISIBLE_DEVICES": "3"}, 4, Restriction("3", "CUDA_VISIBLE_DEVICES=3")),
        (IN_A_STEP | {"SLURM_STEP_GPUS": "0:1"}, 4, None),  # a part of a GPU
    ],
)
def test_the_gpus_are_those_that_the_job_was_given(
    environment: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int, expected: Restriction | None
) -> None:
    within(environment, variables)
    assert restriction(num_gpus) == expected


@pytest.mark.parametrize(
    ("resources", "is_hidden"),
    [("gpu:a100:4(S:0-1)", True), ("shard:8,gpu:4", True), ("(null)", False), ("bandwidth:lustre:4G", False)],
)
def test_a_job_without_gpus_sees_none_where_slurm_hands_them_out(
    environment: pytest.MonkeyPatch, tmp_path: Path, resources: str, is_hidden: bool
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'NodeName=n1 Arch=x86_64 Gres={resources} NodeAddr=n1'\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    environment.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    within(environment, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"})
    found = restriction(4)
    assert (found is not None) == is_hidden
    assert found is None or (found.names == "" and "job 7, which was given no GPU" in found.by)
    assert restriction(0) is None


def test_a_job_without_gpus_sees_all_where_nobody_can_be_asked(environment: pytest.MonkeyPatch) -> None:
    within(environment, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"})
    assert restriction(4) is None
