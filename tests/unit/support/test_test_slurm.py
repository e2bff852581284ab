"""The Slurm to test with: jobs over two nodes, GPUs, a queue, an end, and another beginning."""

from __future__ import annotations

from collections.abc import Iterator

import hosts
import pytest
from hosts.namespaces import wait_until

pytestmark = pytest.mark.hosts


@pytest.fixture(autouse=True)
def no_jobs(test_slurm: hosts.Slurm) -> Iterator[None]:
    yield
    test_slurm.cancel_all()


def _state(slurm: hosts.Slurm, job: str) -> str:
    return slurm.run(["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"]).stdout.strip()


def _submit(slurm: hosts.Slurm, *options: str, script: str = "sleep 60") -> str:
    words = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script]
    return slurm.run(words).stdout.strip()


def test_a_step_runs_on_two_nodes_with_their_gpus(test_slurm: hosts.Slurm) -> None:
    show = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    said = test_slurm.run(["srun", "--nodes=2", "--gpus-per-node=2", "sh", "-c", show]).stdout
    assert sorted(said.split("\n")[:-1]) == ["n1 0,1", "n2 0,1"]


def test_a_job_waits_for_nodes_and_is_cancelled(test_slurm: hosts.Slurm) -> None:
    first = _submit(test_slurm, "--nodes=2", "--exclusive")
    wait_until(lambda: _state(test_slurm, first).startswith("RUNNING"), 20, test_slurm.logs)
    second = _submit(test_slurm, "--nodes=2", "--exclusive")
    wait_until(lambda: _state(test_slurm, second) == "PENDING Resources", 20, test_slurm.logs)
    test_slurm.run(["scancel", second])
    wait_until(lambda: not _state(test_slurm, second).startswith("PENDING"), 20, test_slurm.logs)


def test_a_job_gives_its_nodes_to_an_urgent_one_and_starts_again(test_slurm: hosts.Slurm) -> None:
    first = _submit(test_slurm, "--nodes=2", "--exclusive", "--requeue")
    wait_until(lambda: _state(test_slurm, first).startswith("RUNNING"), 20, test_slurm.logs)
    urgent = _submit(test_slurm, "--partition=urgent", "--nodes=2", "--exclusive", script="sleep 1")
    wait_until(lambda: _state(test_slurm, urgent).startswith("RUNNING"), 30, test_slurm.logs)
    assert _state(test_slurm, first).startswith("PENDING")


def test_no_daemon_listens_on_every_address(test_slurm: hosts.Slurm) -> None:
    for host in (test_slurm.login, *test_slurm.nodes):
        assert {address for address, _ in host.listening()} == {host.address}
