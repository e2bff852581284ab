"""Bad data are told by `nbgpu train` before any engine starts: all that names and headers tell, at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np


def _train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbgpu.cli", "train", *arguments, "--gpus", "none"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def _refused(done: subprocess.CompletedProcess[str], *wrong: str) -> None:
    assert done.returncode == 1
    assert all(text in done.stderr for text in wrong), done.stderr
    assert "Traceback" not in done.stderr
    # What a cluster says of itself when it has started.
    assert "CPU ranks" not in done.stdout


def test_rows_of_a_table(tmp_path: Path) -> None:
    for index in range(4):
        image = nibabel.Nifti1Image(np.random.default_rng(index).normal(size=(8, 8, 8)), np.eye(4))
        nibabel.save(image, tmp_path / f"{index}.nii.gz")
    rows = ["0.nii.gz,3,1", "1.nii.gz,-4,1", "gone.nii.gz,5,0", "3.nii.gz,6,perhaps"]
    (tmp_path / "cohort.csv").write_text("\n".join(["NIFTI path,time,event", *rows]))
    done = _train(tmp_path, "survival", "--data", "cohort.csv", "--image-size", "8", "8", "8")
    _refused(done, "time is -4", "gone.nii.gz: there is no such file", "event is 'perhaps'")


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


def test_a_missing_microstructure(tmp_path: Path) -> None:
    _refused(_train(tmp_path, "microstructure", "--data", "gone.npy"), "gone.npy")
