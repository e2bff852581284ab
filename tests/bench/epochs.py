"""Epochs of the autoencoder on files, with each of the datasets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

import nbgpu

NUM_VOLUMES = 8
EDGE = 96
NUM_EPOCHS = 3
SETTINGS: dict[str, Any] = {
    "patch_size": 16,
    "channels": (8, 16),
    "latent_channels": 2,
    "patches_per_volume": 8,
    "batch_size": 4,
    "val_fraction": 0,
    "val_every": 0,
    "threads": 1,
    "epochs": NUM_EPOCHS,
}
DATASETS: dict[str, dict[str, Any]] = {
    "CacheDataset, all in memory": {"dataset": "cache", "num_workers": 0},
    "PersistentDataset, all on disk": {"dataset": "persistent", "num_workers": 0},
    "Dataset, decoded in the rank's thread": {"dataset": "plain", "num_workers": 0},
    "Dataset, decoded by one worker process a rank": {"dataset": "plain", "num_workers": 1},
}


def measure(
    table: Callable[[str, list[tuple[str, list[float]]]], str],
    ratio: Callable[[str, list[float], list[float]], str],
) -> str:
    times: dict[str, list[float]] = {name: [] for name in DATASETS}
    waits: dict[str, list[float]] = {name: [] for name in DATASETS}
    with tempfile.TemporaryDirectory() as name, nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        folder = Path(name)
        (folder / "volumes").mkdir()
        for number in range(NUM_VOLUMES):
            noise = np.random.default_rng(number).normal(100, 20, (EDGE,) * 3).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), folder / "volumes" / f"{number}.nii.gz")
        places = {
            "data": str(folder / "volumes"),
            "runs_dir": str(folder / "runs"),
        }
        cache = {"cache_dir": str(folder / "cache")}
        for turn in range(4):
            for dataset, settings in DATASETS.items():
                on_disk = cache if settings.get("dataset") == "persistent" else {}
                run = cluster.train("autoencoder", **SETTINGS, **settings, **places, **on_disk).wait()
                if not turn:  # the first of each warms up, and fills the folder of PersistentDataset
                    continue
                steps = run.metrics().dropna(subset="loss").query("rank == 0").set_index("step")
                after_the_first = steps.loc[run.info.steps_per_epoch + 1 :]
                times[dataset].append(float(after_the_first["step_s"].sum()) / (NUM_EPOCHS - 1))
                waits[dataset].append(float(after_the_first["data_s"].sum()) / (NUM_EPOCHS - 1))
    cached, on_disk, decoded, by_workers = times
    rows = [(f"{name}: the epoch", taken) for name, taken in times.items()]
    rows += [(f"{name}: of it, waiting for data", taken) for name, taken in waits.items()]
    return (
        f"{NUM_VOLUMES} volumes of {EDGE}^3 voxels in .nii.gz, {SETTINGS['patches_per_volume']} patches of "
        f"{SETTINGS['patch_size']}^3 of each, two CPU ranks with a thread each; epochs after a run's first one.\n\n"
        + table("s", rows)
        + ratio("cached / decoded again in the rank's thread", times[cached], times[decoded])
        + ratio("from disk / decoded again in the rank's thread", times[on_disk], times[decoded])
        + ratio("decoded by a worker / decoded in the rank's thread", times[by_workers], times[decoded])
    )
