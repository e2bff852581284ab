"""Bad data are told by `nbgpu train` before any engine starts: all at once, and read to their end only
once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import nibabel
import numpy as np
import psutil
import pytest
import torch
from rows import Measured, row

from nbgpu.client.runs import data_check
from nbgpu.config import train_config
from nbgpu.errors import ConfigError, DataError
from nbgpu.planning import suitability
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.recipe import Autoencoder


def _train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbgpu.cli", "train", *arguments, "--gpus", "none"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=360)


def test_missing_paths_are_told_at_once_and_torch_is_not_loaded_for_that(tmp_path: Path) -> None:
    settings = [
        "--data",
        "nope.csv",
        "--split",
        "gone.csv",
        "--pretrained",
        "~/none.pth",
        "--resume",
        "no_run",
    ]
    command = [
        sys.executable,
        "-m",
        "nbgpu.cli",
        "train",
        "survival",
        *settings,
        "--image-size",
        "8",
        "8",
        "8",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert "".join(told).startswith("ConfigError: ")
    for name, path in (
        ("data", "nope.csv"),
        ("split", "gone.csv"),
        ("pretrained", Path("~/none.pth").expanduser()),
    ):
        assert any(
            f"{name} = '{path}': there is no such file or folder. {name}: " in line for line in told
        ), told
    assert any("no_run" in line for line in told)
    imported = {
        line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line
    }
    assert "nbgpu.cli" in imported or "nbgpu.config" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("recipe", "settings", "missing"),
    [
        ("autoencoder", {"data": "nowhere"}, ["data = 'nowhere'"]),
        (
            "autoencoder",
            {"perceptual_weight": 0.1, "perceptual": "features", "perceptual_network": "w"},
            ["w"],
        ),
        ("diffusion", {"data": "nowhere"}, ["data = 'nowhere'"]),
        ("lithography", {"data": "a.gds, b.gds", "pixel_nm": 8.0}, ["data = 'a.gds'", "data = 'b.gds'"]),
        (
            "microstructure",
            {"data": "x.png,y.png,z.png", "initial": "i.npy"},
            ["x.png", "y.png", "z.png", "i.npy"],
        ),
    ],
)
def test_each_recipe_names_the_paths_that_it_cannot_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    settings: dict[str, object],
    missing: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        suitability.require_paths(train_config(recipe, **settings))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(missing)
    assert all(path in line for path, line in zip(missing, lines, strict=True))


def _refused(done: subprocess.CompletedProcess[str], *wrong: str) -> None:
    assert done.returncode == 1
    assert all(text in done.stderr for text in wrong), done.stderr
    assert "Traceback" not in done.stderr
    # What a cluster says of itself when it has started.
    assert "CPU ranks" not in done.stdout


@pytest.mark.long
def test_rows_of_a_table(tmp_path: Path) -> None:
    for index in range(4):
        image = nibabel.Nifti1Image(np.random.default_rng(index).normal(size=(8, 8, 8)), np.eye(4))
        nibabel.save(image, tmp_path / f"{index}.nii.gz")
    rows = ["0.nii.gz,3,1", "1.nii.gz,-4,1", "gone.nii.gz,5,0", "3.nii.gz,6,perhaps"]
    (tmp_path / "cohort.csv").write_text("\n".join(["NIFTI path,time,event", *rows]))
    done = _train(tmp_path, "survival", "--data", "cohort.csv", "--image-size", "8", "8", "8")
    _refused(done, "time is -4", "gone.nii.gz: there is no such file", "event is 'perhaps'")


@pytest.mark.long
def test_files_of_a_folder(tmp_path: Path) -> None:
    for case in ("a", "b"):
        (tmp_path / "brats" / case).mkdir(parents=True)
    whole = nibabel.Nifti1Image(np.random.default_rng(0).normal(size=(8, 8, 8)), np.eye(4))
    for kind in ("t1n", "t1c", "t2w", "t2f"):
        nibabel.save(whole, tmp_path / "brats" / "a" / f"a-{kind}.nii.gz")
    nibabel.save(whole, tmp_path / "brats" / "b" / "b-t1n.nii.gz")
    cut_off = tmp_path / "brats" / "a" / "a-t2f.nii.gz"
    cut_off.write_bytes(cut_off.read_bytes()[:100])
    _refused(_train(tmp_path, "diffusion", "--data", "brats"), "a-t2f.nii.gz", "has no t1c")


@pytest.mark.long
def test_a_missing_microstructure(tmp_path: Path) -> None:
    _refused(_train(tmp_path, "microstructure", "--data", "gone.npy"), "gone.npy")


@pytest.mark.long
def test_a_file_of_weights_beside_generated_data(tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "squeezenet.pth")
    done = _train(
        tmp_path, "autoencoder", "--data", "phantoms", "--perceptual", "features",
        "--perceptual-network", "squeezenet.pth",
    )  # fmt: skip
    _refused(done, "squeezenet.pth: looks like", "has no features.", "(64,)")


def _volumes(folder: Path, count: int) -> None:
    folder.mkdir()
    for index in range(count):
        image = np.random.default_rng(index).normal(size=(20, 20, 20)).astype(np.float32) ** 2
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), folder / f"{index}.nii.gz")


@pytest.mark.long
def test_what_only_voxels_tell(tmp_path: Path) -> None:
    _volumes(tmp_path / "volumes", 4)
    for index, value in ((1, np.nan), (3, 7)):
        image = np.full((20, 20, 20), value, dtype=np.float32)
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), tmp_path / "volumes" / f"{index}.nii.gz")
    # Beside it what the header tells.
    small = nibabel.Nifti1Image(np.ones((20, 20, 4), dtype=np.float32), np.eye(4))
    nibabel.save(small, tmp_path / "volumes" / "4.nii.gz")
    done = _train(tmp_path, "autoencoder", "--data", "volumes", "--patch-size", "16")
    _refused(
        done,
        "1.nii.gz: 8000 of 8000 voxels are NaN",
        "3.nii.gz: is constant",
        "4.nii.gz: has 20 x 20 x 4 voxels",
    )
    assert "0.nii.gz" not in done.stderr


@pytest.mark.long
def test_labels_and_empty_modalities(tmp_path: Path) -> None:
    for case in "ab":
        (tmp_path / "brats" / case).mkdir(parents=True)
        for index, kind in enumerate(("t1n", "t1c", "t2w", "t2f", "seg")):
            voxels = np.random.default_rng(index).integers(0, 4, (8, 8, 8)).astype(np.int16)
            if (case, kind) == ("a", "t2w"):
                voxels[:] = 0
            if (case, kind) == ("b", "seg"):
                voxels[0] = 9
            nibabel.save(
                nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "brats" / case / f"{case}-{kind}.nii.gz"
            )
    done = _train(tmp_path, "diffusion", "--data", "brats")
    _refused(done, "a-t2w.nii.gz: is empty", "b-seg.nii.gz: has the label(s) 9")


@pytest.mark.release
@pytest.mark.long
def test_good_files_are_read_to_their_end_once(tmp_path: Path) -> None:
    _volumes(tmp_path / "volumes", 2)
    config = train_config("autoencoder", data=str(tmp_path / "volumes"), patch_size=16)
    data_check.require_good_data(config)
    # As many bytes of other voxels with the times of the file before: nobody looks into it again.
    changed = tmp_path / "volumes" / "1.nii.gz"
    before, size_bytes = changed.stat(), changed.stat().st_size
    content = bytearray(changed.read_bytes())
    content[size_bytes // 2 : size_bytes // 2 + 64] = bytes(64)
    changed.write_bytes(content)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    data_check.require_good_data(config)
    os.utime(changed)
    with pytest.raises(DataError, match=r"1\.nii\.gz"):
        data_check.require_good_data(config)
    data_check.require_good_data(config.changed(check_voxels=False))


def test_a_volume_that_is_cut_in_two_is_one_volume_to_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    _volumes(tmp_path / "volumes", 1)
    config = train_config("autoencoder", data=str(tmp_path / "volumes"), patch_size=8)
    assert isinstance(config, AutoencoderConfig)
    Autoencoder(config).inspect()
    assert caplog.messages == ["reading 1 volume to its end"]


def test_a_check_that_breaks_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0.nii.gz").touch()
    broken = [sys.executable, "-c", "raise SystemExit('no space left on device')"]
    monkeypatch.setattr(data_check.interpreter, "command", lambda *_: broken)
    data_check.require_good_data(train_config("autoencoder", data=str(tmp_path)))
    assert caplog.messages == [
        "the data were not checked before the start, because the process that reads them ended with code 1: "
        "no space left on device"
    ]


@pytest.mark.cold
@row(
    "`nbgpu train` is killed while its data are read",
    "the process that reads them ends, too",
    bound_s=2,
)
def test_no_process_outlives_its_command(tmp_path: Path, measured: Measured) -> None:
    """The cluster's processes begin to import while the data are read, which takes minutes here."""
    voxels = np.random.default_rng(0).normal(size=(32, 32, 32))
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "volume.nii")
    (tmp_path / "volumes").mkdir()
    for number in range(20_000):
        (tmp_path / "volumes" / f"{number}.nii").symlink_to(tmp_path / "volume.nii")
    arguments = ("autoencoder", "--data", "volumes", "--patch-size", "16", "--gpus", "none")
    command = [sys.executable, "-m", "nbgpu.cli", "train", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as train:
        give_up_s = time.monotonic() + 300
        reader: psutil.Process | None = None
        while len(started := _started_by(train.pid)) < 3 or reader is None:
            assert train.poll() is None
            assert time.monotonic() < give_up_s
            if reader is None and "check" in started and _watches(started["check"]):
                # It would be done, with what it has to say, before the others are there.
                reader = started["check"]
                reader.suspend()
            time.sleep(0.01)
        measured.fault_now()
        train.kill()
    reader.resume()
    started.pop("check")
    reader.wait(30)
    measured.ended()
    assert started.keys() == {"fork_server", "controller"}
    _, alive = psutil.wait_procs(started.values(), timeout=30)
    assert not alive


def _started_by(pid: int) -> dict[str, psutil.Process]:
    """The children of a process that run a module, by the last part of the module's name."""
    children = psutil.Process(pid).children()
    modules = {child: [word for word in child.cmdline() if word.startswith("nbgpu.")] for child in children}
    return {words[0].rpartition(".")[2]: child for child, words in modules.items() if words}


def _watches(process: psutil.Process) -> bool:
    """Whether a process has come to watch its parent."""
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        # It opens and closes files while it is looked at.
        with contextlib.suppress(FileNotFoundError):
            if "[pidfd]" in str(fd.readlink()):
                return True
    return False
