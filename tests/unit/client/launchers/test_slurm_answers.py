"""What sbatch answers, and what it means; programs of the shell stand in for sbatch."""

from __future__ import annotations

import pytest

from nbgpu.client.launchers import slurm
from nbgpu.client.launchers.slurm import Slurm
from nbgpu.errors import ClusterError


def sbatch(script: str) -> Slurm:
    """A Slurm whose programs are a shell script."""
    return Slurm(["sh", "-c", script])


@pytest.mark.parametrize(
    "printed", ["42", "42;here", "Welcome to node 7!\\n42;here", "42\\nYou have 900 hours left."]
)
def test_the_number_of_a_job_is_found_among_other_lines(printed: str) -> None:
    assert sbatch(f"cat > /dev/null; printf '{printed}\\n'").submit("#!/bin/sh") == "42"


def test_a_job_without_a_number_is_refused_in_slurms_words() -> None:
    with pytest.raises(ClusterError, match=r"did not take the job: sbatch: error: no"):
        sbatch("cat > /dev/null; echo 'sbatch: error: no' >&2; exit 1").submit("#!/bin/sh")


def test_a_job_may_be_in_the_queue_though_sbatch_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_SUBMIT_PATIENCE_S", 0.1)
    with pytest.raises(ClusterError, match=r"may have taken the job all the same: `squeue --me`"):
        sbatch("exec sleep 60").submit("#!/bin/sh")
