"""Jobs of a real Slurm: submitted, waiting, running, requeued, ended in each way, and refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from hosts.namespaces import wait_until

from nbgpu.client.launchers.slurm import Slurm, environment
from nbgpu.client.launchers.slurm_script import SlurmRequest, batch_script
from nbgpu.client.launchers.slurm_state import JobState
from nbgpu.errors import ClusterError

pytestmark = pytest.mark.hosts

SECRET = "o0-a-secret-of-the-hub-0o"


@pytest.fixture(scope="module")
def slurm(test_slurm: hosts.Slurm) -> Slurm:
    """The test Slurm as its login host has it."""
    # A job gets the variables of its sbatch, and this folder for temporary files is on no node.
    variables = [f"{name}={value}" for name, value in test_slurm.environment.items()]
    return Slurm(test_slurm.login.entering(["env", "--unset=TMPDIR", *variables]))


@pytest.fixture(autouse=True)
def no_jobs(test_slurm: hosts.Slurm) -> Iterator[None]:
    yield
    test_slurm.cancel_all()


def _submit(
    slurm: Slurm, test_slurm: hosts.Slurm, command: str, setup: str = "", **options: str | int | bool
) -> str:
    gpus = options.pop("gpus", 0)
    request = SlurmRequest(
        2,
        "nbgpu",
        test_slurm.folder / "job.log",
        gpus_per_node=int(gpus),
        options=options,
        setup=[setup] if setup else (),
    )
    return slurm.submit(batch_script(request, ["sh", "-c", command]))


def _wait(slurm: Slurm, job: str, state: str, patience_s: float = 60) -> JobState:
    wait_until(lambda: slurm.state(job).state == state, patience_s, lambda: slurm.state(job))
    return slurm.state(job)


def test_a_job_runs_once_on_each_node_with_its_gpus(slurm: Slurm, test_slurm: hosts.Slurm) -> None:
    log = test_slurm.folder / "job.log"
    log.unlink(missing_ok=True)
    show = "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES $KIND; sleep 30"
    job = _submit(slurm, test_slurm, show, setup="export KIND=test", gpus=2, exclusive=True, time="0:05:00")
    state = _wait(slurm, job, "RUNNING")
    assert state.nodes == ("n1", "n2")
    assert state.time_left_s is not None
    assert 200 < state.time_left_s <= 300
    assert re.fullmatch(rf"job {job} runs on n1, n2; (4 min \d+ s|5 min) left", state.in_words())
    wait_until(
        lambda: log.exists() and log.read_text().count("\n") >= 2,
        120,
        lambda: log.exists() and log.read_text(),
    )
    assert sorted(log.read_text().splitlines()) == ["n1 0 0,1 test", "n2 1 0,1 test"]


def test_a_job_that_waits_says_why_and_is_cancelled(slurm: Slurm, test_slurm: hosts.Slurm) -> None:
    first = _submit(slurm, test_slurm, "sleep 60", exclusive=True, time="0:10:00")
    _wait(slurm, first, "RUNNING")
    second = _submit(slurm, test_slurm, "sleep 60", exclusive=True)
    wait_until(lambda: slurm.state(second).expected_start is not None, 120, lambda: slurm.state(second))
    state = slurm.state(second)
    words = rf"job {second} waits: no nodes are free for it \(Resources\); expected to start at .*, in (9 min.*|10 min)"
    assert re.fullmatch(words, state.in_words())
    slurm.cancel(second)
    assert _wait(slurm, second, "CANCELLED").in_words() == f"job {second} was cancelled"
    slurm.cancel(second)


@pytest.mark.slow
def test_a_job_whose_nodes_are_taken_waits_and_runs_again(slurm: Slurm, test_slurm: hosts.Slurm) -> None:
    job = _submit(slurm, test_slurm, "sleep 60", exclusive=True, requeue=True)
    _wait(slurm, job, "RUNNING")
    urgent = _submit(slurm, test_slurm, "sleep 1", partition="urgent", exclusive=True)
    wait_until(lambda: slurm.state(job).restarts == 1, 120, lambda: slurm.state(job))
    state = slurm.state(job)
    if state.phase == "waiting":
        assert "waits to start again, after it was requeued once" in state.in_words()
    _wait(slurm, urgent, "COMPLETED")


def test_a_job_that_fails_says_with_which_status(slurm: Slurm, test_slurm: hosts.Slurm) -> None:
    job = _submit(slurm, test_slurm, "exit 3")
    state = _wait(slurm, job, "FAILED")
    assert state.in_words() == f"job {job} failed (FAILED, exit status 3)"


def test_a_job_of_a_node_that_fails(slurm: Slurm, test_slurm: hosts.Slurm) -> None:
    job = _submit(slurm, test_slurm, "sleep 60", exclusive=True)
    _wait(slurm, job, "RUNNING")
    test_slurm.run(["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test"])
    words = _wait(slurm, job, "NODE_FAIL").in_words()
    assert words == f"job {job} was ended because a node of n1, n2 failed"


@pytest.mark.long
def test_a_job_whose_time_is_up(slurm: Slurm, test_slurm: hosts.Slurm) -> None:
    job = _submit(slurm, test_slurm, "sleep 300", exclusive=True, time=1)
    _wait(slurm, job, "RUNNING")
    # Slurm looks for such jobs twice a minute.
    test_slurm.run(["scontrol", "update", f"JobId={job}", "EndTime=now+1"])
    words = _wait(slurm, job, "TIMEOUT", patience_s=200).in_words()
    assert words.startswith(f"job {job} was ended by its time limit of 1 min; ")


def test_a_job_that_nobody_has_submitted(slurm: Slurm) -> None:
    assert slurm.state("4000000").phase == "unknown"
    slurm.cancel("4000000")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "gpuu"}, r"invalid partition.*names one of debug, urgent"),
        ({"partition": "theirs"}, r"Invalid account.*'account'"),
        ({"partition": "closed"}, r"not available.*names one of debug"),
        ({"time": "9-00:00:00"}, r"time limit.*asks for less"),
        ({"gpus": 9}, r"Requested node configuration is not available.*ask for fewer"),
        ({"no-such-option": "1"}, r"unrecognized option.*man sbatch"),
    ],
)
def test_a_refusal_is_in_slurms_own_words(
    slurm: Slurm, test_slurm: hosts.Slurm, options: dict[str, str | int | bool], words: str
) -> None:
    with pytest.raises(ClusterError, match=f"(?s)^Slurm did not take the job: .*{words}"):
        _submit(slurm, test_slurm, "true", **options)


def test_where_there_is_no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(ClusterError, match="there is no sbatch on this host"):
        Slurm().submit("#!/bin/sh\n")


def test_no_key_of_the_server_gets_into_slurms_folders(
    slurm: Slurm, test_slurm: hosts.Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", SECRET)
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    assert "SLURM_JOB_ID" not in environment(os.environ)
    job = _submit(slurm, test_slurm, "env; sleep 60", exclusive=True)
    _wait(slurm, job, "RUNNING")
    log = test_slurm.folder / "job.log"
    wait_until(lambda: f"SLURM_JOB_ID={job}" in log.read_text(), 120, log.read_text)
    kept = [path for path in test_slurm.folder.rglob("*") if path.is_file()]
    assert any(path.name == "environment" for path in kept)
    assert [path for path in kept if SECRET.encode() in Path(path).read_bytes()] == []
