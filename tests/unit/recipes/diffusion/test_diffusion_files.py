"""BraTS folders as they are named, and all that can be wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from nbgpu.errors import DataError
from nbgpu.recipes.diffusion.files import (
    MODALITIES,
    find_cases,
    images,
    intensity_limits,
    label,
    scaled,
    voxel_problems,
)

SHAPE = (10, 12, 8)
OLD = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair", "seg": "seg"}


def _write(path: Path, values: np.ndarray, spacing: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([spacing, 1, 1, 1])), path)


def _volume(seed: int) -> np.ndarray:
    volume = np.random.default_rng(seed).uniform(50, 900, SHAPE).astype(np.float32)
    volume[:2] = 0
    return volume


def _labels(*values: int) -> np.ndarray:
    labels = np.zeros(SHAPE, dtype=np.uint8)
    labels[3, 3, : len(values)] = values
    return labels


def _case(root: Path, name: str, labels: tuple[int, ...] = (1, 2, 3), separator: str = "-") -> Path:
    names = OLD if separator == "_" else {kind: kind for kind in OLD}
    for seed, kind in enumerate(MODALITIES):
        _write(root / name / f"{name}{separator}{names[kind]}.nii.gz", _volume(seed))
    _write(root / name / f"{name}{separator}seg.nii.gz", _labels(*labels))
    return root / name


@pytest.mark.parametrize(
    ("stem", "names"),
    [
        ("TCGA-02-0006_1996.08.23_", ("t1", "t1Gd", "t2", "flair", "GlistrBoost_ManuallyCorrected")),
        ("UPENN-GBM-00001_11_", ("T1", "T1GD", "T2", "FLAIR", "segm")),
        ("sub-01_", ("T1w", "ce-gadolinium_T1w", "T2w", "FLAIR", "seg")),
    ],
)
def test_names_of_related_collections_are_known(tmp_path: Path, stem: str, names: tuple[str, ...]) -> None:
    for seed, name in enumerate(names[:4]):
        _write(tmp_path / f"{stem}{name}.nii.gz", _volume(seed))
        (tmp_path / f"._{stem}{name}.nii.gz").write_bytes(b"left by a Mac")
    _write(tmp_path / f"{stem}{names[4]}.nii.gz", _labels(1, 2, 4))
    ((one,), problems) = find_cases(tmp_path)
    assert problems == []
    assert one.name == stem.rstrip("_")
    assert {kind: path.name for kind, path in one.files.items()} == {
        kind: f"{stem}{name}.nii.gz" for kind, name in zip((*MODALITIES, "seg"), names, strict=True)
    }


def test_each_way_of_naming_gives_the_same_modalities(tmp_path: Path) -> None:
    _case(tmp_path / "2023", "BraTS-GLI-00007-001")
    _case(tmp_path / "2020", "BraTS20_Training_007", (1, 2, 4), "_")
    together = np.stack([_volume(MODALITIES.index(kind)) for kind in ("t2f", "t1n", "t1c", "t2w")], axis=-1)
    _write(tmp_path / "Task01" / "imagesTr" / "BRATS_007.nii.gz", together)
    _write(tmp_path / "Task01" / "imagesTr" / "._BRATS_007.nii.gz", together)
    _write(tmp_path / "Task01" / "labelsTr" / "BRATS_007.nii.gz", _labels(2, 1, 3))
    found = []
    for folder, patient in (
        ("2023", "BraTS-GLI-00007"),
        ("2020", "BraTS20_Training_007"),
        ("Task01", "BRATS_007"),
    ):
        (case,), problems = find_cases(tmp_path / folder)
        assert not problems
        assert case.patient == patient
        assert voxel_problems(case) == []
        labels = label(case)
        assert labels is not None
        assert labels[0, 3, 3].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
        found.append(images(case))
    for kind in MODALITIES:
        for other in found[1:]:
            torch.testing.assert_close(other[kind], found[0][kind], rtol=0, atol=0)


@pytest.mark.parametrize("labels", [(1, 2, 4), (1, 2, 3, 4)])
def test_a_cavity_after_treatment_is_not_taken_for_what_enhances(
    tmp_path: Path, labels: tuple[int, ...]
) -> None:
    _case(tmp_path, "BraTS-GLI-02062-101", labels)
    ((case,), _) = find_cases(tmp_path)
    with pytest.raises(DataError, match=r"has the label\(s\) 4\. .*4 is the cavity: make it 0"):
        label(case)


def test_brightness_goes_by_the_percentiles_of_what_is_not_0() -> None:
    volume = torch.cat([torch.zeros(500), torch.arange(1.0, 1002.0)])
    got = scaled(volume, *intensity_limits(volume, "a"))
    assert (got[:500] == -1).all()
    assert got[500 + 10] == -1
    assert got[500 + 990] == 1
    assert float(got[500 + 500]) == pytest.approx(0, abs=1e-6)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    good = _case(tmp_path, "BraTS-GLI-00000-000")
    no_t1c = _case(tmp_path, "BraTS-GLI-00001-000")
    (no_t1c / f"{no_t1c.name}-t1c.nii.gz").unlink()
    shape = _case(tmp_path, "BraTS-GLI-00002-000")
    _write(shape / f"{shape.name}-t2w.nii.gz", _volume(0)[:-1])
    moved = _case(tmp_path, "BraTS-GLI-00003-000")
    _write(moved / f"{moved.name}-t2f.nii.gz", _volume(0), spacing=1.2)
    short = _case(tmp_path, "BraTS-GLI-00004-000") / "BraTS-GLI-00004-000-t1n.nii.gz"
    short.write_bytes(short.read_bytes()[:-900])
    shutil.copytree(good, tmp_path / "again" / good.name)
    twice = _case(tmp_path, "BraTS-GLI-00005-000")
    _write(twice / f"{twice.name}-t1n.nii", _volume(0))
    empty = _case(tmp_path, "BraTS-GLI-00006-000")
    _write(empty / f"{empty.name}-t1n.nii.gz", np.zeros(SHAPE, dtype=np.float32))
    bad = _volume(0)
    bad[5, 5, 5] = np.nan
    _write(empty / f"{empty.name}-t1c.nii.gz", bad)
    labels = _case(tmp_path, "BraTS-GLI-00007-000", (1, 3, 4, 9))

    whole, problems = find_cases(tmp_path)
    assert {case.name[-5:-4] for case in whole} == {"0", "5", "6", "7"}
    text = "\n".join(problems + [told for case in whole for told in voxel_problems(case)])
    for place, reason in {
        str(no_t1c): "has no t1c",
        f"{shape.name}-t2w": "has 9 x 12 x 8 voxels, and",
        f"{moved.name}-t2f": "affine",
        str(short): "truncated",
        good.name: "is in 2 folders",
        f"{twice.name}-t1n.nii": "same modality",
        f"{empty.name}-t1n": "is empty",
        f"{empty.name}-t1c": "1 of 960 voxels are NaN",
        f"{labels.name}-seg": "label(s) 4, 9",
    }.items():
        assert any(place in line and reason in line for line in text.splitlines()), (place, reason, text)
    assert len(text.splitlines()) == 9


def test_a_folder_with_no_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        find_cases(tmp_path / "nowhere")
    _write(tmp_path / "a_t1_bias.nii.gz", _volume(0))
    with pytest.raises(DataError, match="named as those of BraTS"):
        find_cases(tmp_path)


def test_a_folder_of_links_is_searched_and_the_trash_is_not(tmp_path: Path) -> None:
    _case(tmp_path / "store", "BraTS-GLI-00001-000")
    root = tmp_path / "chosen"
    _case(root, "BraTS-GLI-00002-000")
    _case(root / ".Trash-1000" / "files", "BraTS-GLI-00003-000")
    (root / "linked").symlink_to(tmp_path / "store")
    (root / "circle").symlink_to(root)
    (root / "BraTS-GLI-00004-000-t1n.nii").mkdir()
    cases, problems = find_cases(root)
    assert problems == []
    assert [case.name for case in cases] == ["BraTS-GLI-00002-000", "BraTS-GLI-00001-000"]
