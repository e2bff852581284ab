"""Worker processes of real ranks: the same batches as without them, and an end that is told and leaves
nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pairs
import psutil
import pytest
from conftest import SUPPORT

import nbgpu
from nbgpu.recipes.phantoms import phantom


@pytest.fixture(scope="module")
def ranks(cluster2: nbgpu.Cluster) -> nbgpu.Cluster:
    """They know `pairs`, and so do their workers."""
    cluster2.execute(f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); import pairs")
    return cluster2


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return pairs.write(tmp_path)


def on_each(ranks: nbgpu.Cluster, code: str) -> dict[int, Any]:
    ranks.execute(f"from pathlib import Path, PosixPath\nfound = {code}")
    return ranks.pull("found", ranks="all")


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "plain"},
        {"dataset": "plain", "persistent_workers": "off"},
        {"dataset": "cache", "cache_rate": 0.5},
        {"cache_rate": 0.5, "replace_rate": 0.5},
    ],
    ids=str,
)
def test_batches_do_not_depend_on_the_number_of_workers(
    ranks: nbgpu.Cluster, files: list[Path], settings: dict[str, Any]
) -> None:
    on_each(ranks, f"pairs.assert_workers_change_nothing({files}, rank, {settings})")


@pytest.mark.timeout(240)
def test_what_goes_wrong_in_a_worker_is_told_in_words(ranks: nbgpu.Cluster, files: list[Path]) -> None:
    for pid, told in on_each(ranks, f"pairs.what_a_killed_worker_gives({files})").values():
        assert f"rank 0: the worker process {pid} that reads data was killed by SIGKILL" in told
    for told in on_each(ranks, f"pairs.what_a_lambda_gives({files})").values():
        assert re.search("the data cannot be sent to worker processes .*or set num_workers=0", told)
    files[3].write_bytes(b"")
    for told in on_each(ranks, f"pairs.what_a_bad_file_gives({files})").values():
        assert told.startswith("3: cannot be decoded (EOFError")
        assert "Traceback" not in told


def volumes(folder: Path, num: int) -> str:
    folder.mkdir()
    for number in range(num):
        voxels = np.random.default_rng(number).random((12,) * 3, dtype=np.float32)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / f"{number}.nii.gz")
    return str(folder)


SETTINGS: dict[str, Any] = {
    "patch_size": 8,
    "patches_per_volume": 2,
    "batch_size": 2,
    "val_every": 0,
    "threads": 1,
    "dataset": "plain",
    "num_workers": 1,
}


def family_of(ranks: nbgpu.Cluster) -> dict[int, list[psutil.Process]]:
    """The worker processes by rank."""
    return {
        rank: [worker for child in psutil.Process(pid).children() for worker in child.children()]
        for rank, pid in ranks.pids.items()
    }


def wait_until_training(run: Any, step: int) -> None:
    give_up_s = time.monotonic() + 300
    while max(s.step for s in run.statuses()) < step:
        assert time.monotonic() < give_up_s, f"{run} did not get to step {step}: {run.failures}"
        time.sleep(0.02)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_ends_its_workers_and_is_ended_by_one_that_is_killed(
    ranks: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "data": volumes(tmp_path / "volumes", 8), "runs_dir": str(tmp_path)}
    run = ranks.train("autoencoder", **settings, steps=4).wait(400)
    assert run.info.data[-1] == "1 worker process for each rank: as the settings say"
    assert not any(family_of(ranks).values())

    run = ranks.train("autoencoder", **settings, steps=100_000)
    wait_until_training(run, 3)
    workers = family_of(ranks)
    assert [len(of_rank) for of_rank in workers.values()] == [1, 1]
    run.stop()
    assert run.wait(400).status == "stopped"
    wait_until_gone(workers[0] + workers[1])

    run = ranks.train("autoencoder", **settings, steps=100_000)
    wait_until_training(run, 3)
    workers = family_of(ranks)
    workers[1][0].kill()
    with pytest.raises(
        nbgpu.RankError, match=rf"rank 1: the worker process {workers[1][0].pid} .* killed by SIGKILL"
    ):
        run.wait(400)
    wait_until_gone(workers[0])
    assert ranks.execute("print(rank)") == {0: "0\n", 1: "1\n"}

    # A rank that dies takes its workers along, and the one in its place has its own.
    run = ranks.train("autoencoder", **settings, steps=100_000)
    wait_until_training(run, 3)
    workers = family_of(ranks)
    os.kill(ranks.pids[1], signal.SIGKILL)
    wait_until_gone(workers[1])
    wait_until_training(run, max(s.step for s in run.statuses()) + 5)
    assert [p.is_running() for p in workers[0]] == [True]
    run.stop()
    assert run.wait(400).status == "stopped"
    assert not any(family_of(ranks).values())
    ranks.parts.state.news.clear()


COUNTING = """
from nbgpu.recipes.autoencoder.recipe import Autoencoder
seen, _plain_loss = [], Autoencoder.loss
def _noting(self, model, batch):
    seen.append(batch["image"].double().sum(dim=(1, 2, 3, 4)).tolist())
    return _plain_loss(self, model, batch)
Autoencoder.loss = _noting
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("num_volumes", "settings", "num_uses"),
    [
        (8, {}, {1: 8}),
        (8, {"accumulate": 2, "dataset": "plain"}, {1: 8}),
        (7, {}, {1: 6, 2: 1}),
        (7, {"shards": "uneven", "batch_size": 1}, {1: 6}),
        (6, {"batch_size": 2, "dataset": "plain", "num_workers": 1}, {1: 4, 2: 2}),
    ],
    ids=str,
)
def test_every_volume_is_trained_on_once_an_epoch_over_all_ranks(
    ranks: nbgpu.Cluster, tmp_path: Path, num_volumes: int, settings: dict[str, Any], num_uses: dict[int, int]
) -> None:
    """Counted where the loss is computed; `num_uses` is how many volumes are used how often."""
    values = {
        "data": "phantoms",
        "patch_size": 8,
        "num_phantoms": num_volumes,
        "val_fraction": 0,
        "batch_size": 2,
        "val_every": 0,
        "threads": 1,
        **settings,
    }
    ranks.execute(COUNTING)
    try:
        run = ranks.train("autoencoder", **values, epochs=3, runs_dir=str(tmp_path)).wait(400)
    finally:
        ranks.execute("Autoencoder.loss = _plain_loss")
    accumulate = values.get("accumulate", 1)
    batches = ranks.pull("seen", ranks="all")
    names = {float(phantom(8, 0, index).double().sum()): index for index in range(num_volumes)}
    steps = run.info.steps_per_epoch
    for epoch in range(3):
        taken = slice(epoch * steps * accumulate, (epoch + 1) * steps * accumulate)
        uses = Counter(names[value] for rank in (0, 1) for batch in batches[rank][taken] for value in batch)
        assert Counter(uses.values()) == num_uses
    assert len(batches[0]) == len(batches[1]) == 3 * steps * accumulate
    num_taken = sum(times * num for times, num in num_uses.items())
    num_repeated, num_left_out = num_taken - sum(num_uses.values()), num_volumes - sum(num_uses.values())
    told = run.info.data[2]
    assert told.startswith(f"an epoch has {steps} step")
    assert (f"{num_repeated} of its {num_taken} samples are repeats" in told) == (num_repeated > 0)
    assert (f"{num_left_out} are left out" in told) == (num_left_out > 0)
    assert ("every sample exactly once" in told) == (num_repeated == num_left_out == 0)


@pytest.mark.timeout(240)
def test_settings_that_do_nothing_on_a_cpu_are_told(ranks: nbgpu.Cluster, tmp_path: Path) -> None:
    values = {"data": "phantoms", "patch_size": 8, "num_phantoms": 8, "steps": 2, "runs_dir": str(tmp_path)}
    run = ranks.train("autoencoder", **values, pin_memory="on").wait(400)
    assert [note for note in run.notes() if "pin_memory='on' does nothing: the ranks have no GPU" in note]
    run = ranks.train("autoencoder", **values, transforms_on="gpu").wait(400)
    assert [note for note in run.notes() if "transforms_on='gpu' runs on the CPU" in note]
