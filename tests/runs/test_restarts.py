"""A job that torchrun, Slurm or Kubernetes starts again goes on in one run folder, to the last bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbgpu
from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.protocol.records import Event, Sample
from nbgpu.run_folder import checkpoint_files, job
from nbgpu.run_folder.reader import Reader

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 30,
    "steps": 60,
    "checkpoint_every": 5,
    "val_every": 0,
    "threads": 1,
}
_PATIENCE_S = 300


@contextmanager
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A torchrun, of which nothing is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["--max-restarts=1", "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")]
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        job.VARIABLE: "test-job",
        job.AGAIN: str(tmp_path / "again"),
    }
    output = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
    ) as one:
        try:
            yield one
        finally:
            for process in (
                [*psutil.Process(one.pid).children(recursive=True), one] if one.poll() is None else []
            ):
                process.kill()


def ranks_of(torchrun: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(torchrun.pid).children():
        with suppress(psutil.NoSuchProcess):  # a zombie counts as that too
            if "nbgpu.engine.train" in process.cmdline():
                found.append(process)
    return found


def wait_until(holds: Callable[[], bool], torchrun: subprocess.Popen[str]) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert torchrun.poll() is None, torchrun.communicate()[0]
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def newest_step(runs_dir: Path) -> int:
    folders = runs_dir.iterdir() if runs_dir.exists() else ()
    found = [path for folder in folders for path in checkpoint_files.checkpoints(folder)]
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def losses(folder: Path) -> dict[tuple[int, int], float]:
    records, _ = Reader(folder, world_size=3, live=False).since()
    return {
        (r.rank, r.step): r.values["loss"] for r in records if isinstance(r, Sample) and "loss" in r.values
    }


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_goes_on_in_one_folder_after_every_end(cluster3: nbgpu.Cluster, tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    settings = {**SMALL, "runs_dir": str(runs_dir), "resume": "auto", "run_name": "test-job"}
    write_toml(tmp_path / "run.toml", ClusterConfig(gpus="none"), train_config("autoencoder", **settings))
    straight = cluster3.train("autoencoder", **SMALL, runs_dir=str(tmp_path / "straight")).wait(_PATIENCE_S)

    with started(tmp_path) as torchrun:
        wait_until(lambda: newest_step(runs_dir) >= 5, torchrun)
        # A rank dies: torchrun starts all again.
        killed = ranks_of(torchrun)[1]
        killed.kill()
        wait_until(lambda: len(ranks_of(torchrun)) == 3 and killed not in ranks_of(torchrun), torchrun)
        killed_before = newest_step(runs_dir) + 1
        wait_until(lambda: newest_step(runs_dir) >= killed_before, torchrun)
        # Time is nearly up: all stop with a checkpoint, torchrun starts none again, and the job may queue
        # again.
        ranks_of(torchrun)[1].send_signal(signal.SIGUSR1)
        text, _ = torchrun.communicate(timeout=_PATIENCE_S)
        assert torchrun.returncode == 0, text
        assert "stopped: " in text
    (folder,) = runs_dir.iterdir()
    assert (tmp_path / "again").read_text() == f"{folder}\n"

    with started(tmp_path) as torchrun:
        before = newest_step(runs_dir)
        wait_until(lambda: newest_step(runs_dir) > before, torchrun)
        # The launcher ends the job, as at a preemption.
        torchrun.terminate()
        text, _ = torchrun.communicate(timeout=_PATIENCE_S)
        assert torchrun.returncode not in (0, None), text
    stopped_at = newest_step(runs_dir)
    assert stopped_at < SMALL["steps"], "the run was over too early: this test shows nothing"

    for said in ("finished: ", "finished already: "):
        with started(tmp_path) as torchrun:
            text, _ = torchrun.communicate(timeout=_PATIENCE_S)
            assert torchrun.returncode == 0, text
            assert said + str(folder) in text
    assert list(runs_dir.iterdir()) == [folder]
    found, unhurt = losses(folder), losses(straight.folder)
    assert found.items() <= unhurt.items()
    # What a killed rank has not written yet is lost with it, and is not computed again before the checkpoint.
    assert all(rank == 1 and step < killed_before for rank, step in unhurt.keys() - found.keys())
    assert len(found) > 0.95 * len(unhurt)
    records, _ = Reader(folder, world_size=3, live=False).since()
    notes = [r.text for r in records if isinstance(r, Event) and r.kind == "note"]
    assert any("SIGUSR1" in note for note in notes)
    assert any("SIGTERM" in note for note in notes)
    assert checkpoint_files.newest_whole(folder).checkpoint is not None
