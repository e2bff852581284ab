"""Settings that are left out are chosen by the files and the memory, and the same ever after."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import nbgpu
from nbgpu.client.engines.calls import reference
from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.engine.workload import by_name
from nbgpu.errors import ConfigError, RankError
from nbgpu.protocol.calls import Call
from nbgpu.run_folder import folder as runs

# The first axis of the files goes to the top, the second to the right, and the third to the front.
AFFINE = np.array([[0.0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])


def _volumes(folder: Path, shapes: Sequence[tuple[int, int, int]]) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index, shape in enumerate(shapes):
        nibabel.save(
            nibabel.Nifti1Image(rng.normal(0, 300, shape).astype(np.int16), AFFINE), folder / f"{index}.nii"
        )
    return folder


def _cohort(folder: Path, shapes: Sequence[tuple[int, int, int]]) -> Path:
    lines = ["NIFTI path,time,event"]
    lines += [f"{index}.nii,{30 - index},{int(index % 3 > 0)}" for index in range(len(shapes))]
    (_volumes(folder, shapes) / "cohort.csv").write_text("\n".join(lines))
    return folder / "cohort.csv"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve patients, whose volumes are 24 x 40 x 16 voxels (right, front, top) in the median."""
    return _cohort(tmp_path_factory.mktemp("data") / "cohort", [(16, 24, 40)] * 7 + [(32, 48, 56)] * 5)


SMALL: dict[str, Any] = {"steps": 2, "batch_size": 4, "widen_factor": 0.125, "val_every": 2, "threads": 1}


def test_a_cohort_gets_the_median_size_and_later_runs_keep_it(
    cluster2: nbgpu.Cluster, cohort: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {**SMALL, "data": str(cohort), "runs_dir": str(tmp_path)}
    plan = cluster2.plan("survival", **asked)
    run = cluster2.train("survival", **asked).wait(400)
    assert run.status == "finished", run.failures
    _, config = runs.read_settings(run.folder)
    assert getattr(config, "image_size", None) == (24, 40, 16)
    for words in (plan.data[0], run.plan.data[0]):
        assert "image_size=(24, 40, 16) (the median of 12 volumes is 24 x 40 x 16; " in words
    # With other volumes, what was learned goes on with the size that it was learned with.
    larger = _cohort(tmp_path / "larger", [(64, 64, 64)] * 12)
    again = cluster2.train(
        "survival", **{**asked, "data": str(larger), "steps": 4}, resume=str(run.folder)
    ).wait(400)
    assert again.status == "finished", again.failures
    assert getattr(runs.read_settings(again.folder)[1], "image_size", None) == (24, 40, 16)
    assert again.plan.data[0].startswith("as in the checkpoint, because left out: image_size=(24, 40, 16)")
    found = cluster2.predict(run, str(larger), tmp_path / "risks")
    assert not found.failed
    assert len(found.rows) == 12


def test_what_is_given_is_not_chosen(cluster2: nbgpu.Cluster, cohort: Path) -> None:
    config = train_config("survival", data=str(cohort), image_size=(8, 8, 16))
    assert cluster2.parts.runs.settle(config).config == config
    assert cluster2.parts.runs.settle(train_config("survival")).config == train_config("survival")


@pytest.mark.long
@pytest.mark.release
def test_a_single_process_chooses_as_a_cluster_does(
    cluster2: nbgpu.Cluster, cohort: Path, tmp_path: Path
) -> None:
    config = train_config("survival", **SMALL, data=str(cohort), runs_dir=str(tmp_path / "runs"))
    write_toml(tmp_path / "run.toml", ClusterConfig(gpus="none", ranks=1), config)
    command = [sys.executable, "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    (folder,) = (tmp_path / "runs").iterdir()
    assert runs.read_settings(folder)[1] == cluster2.parts.runs.settle(config).config
    assert "the median of 12 volumes" in json.loads((folder / "chosen.json").read_text())["words"][0]


@pytest.mark.long
def test_an_autoencoder_gets_a_network_and_patches_that_fit(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    data = _volumes(tmp_path / "volumes", [(70, 40, 90), (64, 64, 64), (90, 90, 90)])
    asked = train_config("autoencoder", data=str(data), runs_dir=str(tmp_path), steps=1)
    with pytest.raises(ConfigError, match="patch_size, channels, latent_channels: left out, and chosen only"):
        by_name.load(asked)

    def chosen(config: Any, on_gpu: bool, memory_bytes: int) -> Any:
        call = reference(Call.CHOOSE_FROM_DATA)
        return cluster2.apply(call, config.model_dump(mode="json"), on_gpu, memory_bytes, ranks=[0])[0].values

    # The narrowest volume has 40 voxels across.
    large = {"patch_size": 40, "channels": (64, 128, 256), "latent_channels": 8}
    assert chosen(asked, True, 80 * 2**30) == large
    small = chosen(asked, True, 2**30)
    assert small["channels"] < (64, 128, 256)
    assert cluster2.parts.runs.plan_with(asked.changed(**small)).memory["peak"] < 2**30
    assert chosen(asked.changed(channels=(4, 8, 8, 8, 8)), True, 80 * 2**30)["patch_size"] == 32
    assert chosen(asked, False, 80 * 2**30) == {**large, "patch_size": 32, "channels": (16, 32, 64)}
    run = cluster2.parts.runs.train_with(
        asked.changed(channels=(4, 8), batch_size=1, patches_per_volume=1)
    ).wait(400)
    assert run.status == "finished", run.failures
    assert (getattr(run.config, "patch_size", 0), getattr(run.config, "latent_channels", 0)) == (32, 8)


def test_bad_files_are_told_with_their_lines(cluster2: nbgpu.Cluster, cohort: Path) -> None:
    bad = cohort.with_name("bad.csv")
    bad.write_text(cohort.read_text() + "\nnone.nii,3,1\n0.nii,-1,1\n")
    with pytest.raises(RankError) as caught:
        cluster2.train("survival", data=str(bad))
    assert "line 14" in str(caught.value)
    assert "line 15" in str(caught.value)
