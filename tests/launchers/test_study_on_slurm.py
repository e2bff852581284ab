"""A study whose ranks are in a job of its own on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import hosts
import pytest
from hosts.far_python import FarPython
from hosts.namespaces import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 300
BEGIN = """
import nbgpu
settings = dict(data='phantoms', patch_size=16, num_phantoms=8, batch_size=1, threads=1, studies_dir={folder!r})
job = dict(launcher='slurm', nodes=2, gpus='none', launcher_options={{'time': '0:10:00'}})
s = nbgpu.scaling('autoencoder', ranks=[1, 2], repeats=1, measured_steps=3, warm_up_steps=1, **settings, **job)
"""


@pytest.fixture(scope="module")
def notebook(test_slurm: hosts.Slurm) -> Iterator[FarPython]:
    with FarPython(test_slurm.login, PATIENCE_S) as opened:
        yield opened


def jobs(slurm: hosts.Slurm) -> list[str]:
    """The states of the jobs that wait or run."""
    return slurm.run(["squeue", "--noheader", "--format=%T"]).stdout.split()


def test_a_study_waits_for_its_job_and_a_stop_cancels_it(
    notebook: FarPython, test_slurm: hosts.Slurm
) -> None:
    test_slurm.run(["sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 200"])
    try:
        notebook.run(BEGIN.format(folder=str(test_slurm.folder / "studies")))
        wait_until(
            lambda: sorted(jobs(test_slurm)) == ["PENDING", "RUNNING"],
            PATIENCE_S,
            lambda: str(jobs(test_slurm)),
        )
        notebook.run("import time\nwhile ' waits' not in s.describe(): time.sleep(0.1)")
        notebook.run(f"s.stop(); s.wait({PATIENCE_S}, progress=False)")
        assert notebook.value("[s.status, len(s.measured())]") == ["stopped", 0]
        assert jobs(test_slurm) == ["RUNNING"]
    finally:
        test_slurm.cancel_all()
    test_slurm.wait_until_idle()
    # With the nodes free it measures what is missing.
    notebook.run(f"s.resume().wait({PATIENCE_S}, progress=False)")
    measured = notebook.value("[(each.point, len(each.step_s), each.why_failed) for each in s.measured()]")
    assert measured == [[0, 3, ""], [1, 3, ""]]
    assert notebook.value("s.environment['host']") == "n1, n2"
    wait_until(lambda: not jobs(test_slurm), PATIENCE_S, lambda: str(jobs(test_slurm)))
