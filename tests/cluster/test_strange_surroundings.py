"""Surroundings in which a cluster works all the same, or says in a sentence why it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rows import row

pytestmark = pytest.mark.cold

TRAIN = (
    *("train", "autoencoder", "--gpus", "none", "--ranks", "1", "--data", "phantoms", "--patch-size", "16"),
    *("--num-phantoms", "8", "--steps", "2", "--val-every", "0"),
)


def _nbgpu(
    folder: Path, *arguments: str, limit: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command under a limit of the shell's, such as 'ulimit -n 64'."""
    command = ["bash", "-c", f'{limit or ":"} && exec "$@"', "bash", sys.executable, "-m", "nbgpu.cli"]
    return _run([*command, *arguments], folder, variables)


def _run(
    command: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)


@row("`{limit}` where a cluster starts", "it is refused in a sentence, before anything starts", bound_s=None)
@pytest.mark.parametrize("limit", ["ulimit -n 64", "ulimit -n 128", "ulimit -f 1", "ulimit -f 100"])
def test_a_limit_is_refused_in_a_sentence(tmp_path: Path, limit: str) -> None:
    done = _nbgpu(tmp_path, *TRAIN, limit=limit)
    assert done.returncode == 1
    assert done.stderr.startswith("ClusterError: a ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{limit[:9]} " in done.stderr, "what to do"


@pytest.mark.long
@row("`PYTHONWARNINGS=error`", "the cluster starts and trains; a warning in a cell is an error", bound_s=None)
def test_warnings_that_are_errors(tmp_path: Path) -> None:
    script = """
import warnings, nbgpu
with nbgpu.Cluster(gpus="none", ranks=1) as cluster:
    settings = dict(data="phantoms", patch_size=16, num_phantoms=8, steps=2, val_every=0, num_workers=1)
    print(cluster.train("autoencoder", **settings).wait(400).status)
    try:
        cluster.execute("import warnings; warnings.warn('of the person')")
    except nbgpu.RankError as error:
        print(error)
"""
    done = _run([sys.executable, "-c", script], tmp_path, {"PYTHONWARNINGS": "error"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finished\n")
    assert "UserWarning: of the person" in done.stdout


@pytest.mark.long
@pytest.mark.release
def test_without_docstrings_and_asserts(tmp_path: Path) -> None:
    """`python -OO` leaves both out, also on the ranks."""
    own = ("train", "my_recipe.py", "--gpus", "none", "--ranks", "2", "--steps", "2", "--num-workers", "1")
    for arguments in (("recipes",), ("train", "autoencoder", "--help"), ("new", "my_recipe"), own):
        done = _nbgpu(tmp_path, *arguments, PYTHONOPTIMIZE="2")
        assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "nbgpu_runs").iterdir()
    assert json.loads((run / "rank0.outcome.json").read_text())["state"] == "finished"


@pytest.mark.long
@row(
    "`TMPDIR` is a path of more than 107 characters",
    "the cluster starts, frees its ranks and trains",
    bound_s=None,
)
def test_a_temporary_folder_with_a_long_path(tmp_path: Path) -> None:
    """The kernel takes no more than 107 characters for the path of a Unix socket."""
    script = """
import nbgpu
with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
    try:
        cluster.execute("assert rank == 1, 'on purpose'\\ndist.barrier()")
    except nbgpu.RankError as error:
        print(error)
    settings = dict(data="phantoms", patch_size=16, num_phantoms=8, steps=2, val_every=0, num_workers=1)
    print(cluster.train("autoencoder", **settings).wait(400).status)
"""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    done = _run([sys.executable, "-c", script], tmp_path, {"TMPDIR": str(deep)})
    assert done.returncode == 0, done.stderr
    assert "AssertionError: on purpose" in done.stdout
    assert done.stdout.endswith("finished\n")


@pytest.mark.long
@pytest.mark.skipif(
    bool(subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode),
    reason="a small /dev/shm is mounted, which needs root here",
)
def test_a_small_dev_shm(tmp_path: Path) -> None:
    """A container has 64 MB, which a few batches of worker processes fill. Here smaller ones fill less."""
    script = """
import nbgpu
LOADER = '''
from torch.utils.data import DataLoader
for batch in DataLoader(torch.ones(16, 2**{}), batch_size=4, num_workers=1):
    pass
print(batch.sum().item())
'''
with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
    cluster.execute("x = torch.ones(2**22); dist.all_reduce(x)")  # 16 MiB, which gloo sends elsewhere
    try:
        cluster.execute(LOADER.format(20))
    except nbgpu.RankError as error:
        print(error.failures[0].traceback)
    print(cluster.execute(LOADER.format(10))[1])
    settings = dict(data="phantoms", patch_size=16, num_phantoms=8, steps=2, val_every=0, dataset="plain", batch_size=48)
    print(cluster.train("autoencoder", **settings).wait(400).status)
    cluster.train("autoencoder", num_workers=1, **settings).wait(400)
"""
    small = 'mount -t tmpfs -o size=512k tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--", "bash", "-c", small, "bash", sys.executable, "-c", script]
    done = _run(command, tmp_path, {})
    advice = (
        "/dev/shm, through which worker processes send their samples, has 512.0 KiB and is full. Give it more"
    )
    assert f"\n{advice}" in done.stdout, done.stderr
    assert "\n4096.0\n" in done.stdout, "the ranks go on"
    assert "\nfinished\n" in done.stdout, "without workers, which is the default there"
    assert f"RunError: {advice}" in done.stderr.splitlines()[-1]
