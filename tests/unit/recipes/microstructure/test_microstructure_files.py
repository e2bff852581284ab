"""Microstructure files: real ones, bad ones, all refused at once, and VTK as another program reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.files import load_fields, write_vtk
from nbgpu.recipes.microstructure.measure import Measure

MEASURE = Measure(limit_to=8)
NAMES = ["FFTCorrelations"]


@pytest.mark.requires_shared_data
@pytest.mark.parametrize(
    ("name", "multiphase", "shape", "share"),
    [
        ("alloy_resized", False, (1, 256, 256), 56694 / 65536),
        ("alloy_resized_s", False, (1, 64, 64), 3500 / 4096),
        ("carbonate_resized", False, (1, 256, 256), 9127 / 65536),
        ("composite_resized", True, (3, 256, 256), 11089 / 65536),
        ("pymks_ms_64x64_2", False, (1, 64, 64), 1295 / 4096),
        ("pymks_ms_64x64_2", True, (2, 64, 64), 1295 / 4096),
    ],
)
def test_real_files_become_fields(
    shared_data: Path, name: str, multiphase: bool, shape: tuple[int, ...], share: float
) -> None:
    ((field,), _) = load_fields(
        str(shared_data / "microstructures" / f"{name}.npy"), NAMES, MEASURE, multiphase, threshold=None
    )
    assert tuple(field.shape) == shape
    assert field.dtype == torch.float64
    assert field[-1].mean().item() == share


def _picture(size: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2, (size, size))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (_picture() * 2, r"phases must be 0 to n - 1 without gaps; missing: 1"),
        (_picture() + np.eye(32, dtype=int), "holds 3 phases, which needs multiphase=True"),
        (np.dstack([_picture(), 1 - _picture(), _picture()]), "has 3 channels of colour that differ"),
        (_picture() - 1, "holds negative phases: -1"),
        (_picture() - 0.5, r"holds floats from -0.5 to 0.5; they must be shares from 0 to 1"),
        (np.where(_picture() == 1, np.nan, 0.5), r"holds \d+ values that are NaN or infinite"),
        (_picture(12), r"shape \(12, 12\) of int64, and each axis needs at least 2 x limit_to = 16"),
        (np.zeros((0, 32), int), r"shape \(0, 32\) of int64, and each axis needs at least 2 x limit_to = 16"),
        (np.zeros((32, 32), int), "holds one phase only"),
        (np.zeros(64, int), r"it takes \(H, W\) or \(D, H, W\)"),
        (np.zeros((16, 16, 16, 3)), "A last axis of 3 is for orientations"),
        (_picture().astype(complex), "holds complex128"),
        (np.array([[{}]]), "cannot be read as a .npy file of numbers"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, values: np.ndarray, said: str) -> None:
    path = tmp_path / "bad.npy"
    np.save(path, values, allow_pickle=True)
    with pytest.raises(DataError, match=said) as caught:
        load_fields(str(path), NAMES, MEASURE, multiphase=False, threshold=None)
    assert str(path) in str(caught.value)


def _grey(size: int = 32) -> np.ndarray:
    """Two phases with grey values around 80 and 180."""
    noise = np.random.default_rng(1).normal(0, 8, (size, size))
    return (np.where(_picture(size) == 1, 180, 80) + noise).round()


def _save_picture(path: Path, values: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, values)
    elif values.ndim == 3 and values.shape[-1] not in (3, 4):
        first, *others = [Image.fromarray(page) for page in values]
        first.save(path, save_all=True, append_images=others)
    else:
        Image.fromarray(values).save(path)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.npy"])
@pytest.mark.parametrize(
    "grey",
    [
        _picture().astype(np.uint8) * 255,
        _grey().astype(np.uint8),
        _grey().astype(np.uint16) * 200,
        np.dstack([_grey().astype(np.uint8)] * 3),
        _grey().astype(np.uint8)[..., None],
        _grey(),
    ],
    ids=["black and white", "8 bit", "16 bit", "grey in RGB", "one channel", "floats"],
)
def test_pictures_of_grey_values_are_cut_into_two_phases(tmp_path: Path, name: str, grey: np.ndarray) -> None:
    if grey.dtype.kind == "f":
        name = "a.npy"  # Pillow writes no floats of 64 bits
    if not name.endswith(".npy"):
        grey = grey.squeeze()
    path = _save_picture(tmp_path / name, grey)
    (field,), notes = load_fields(str(path), NAMES, MEASURE, multiphase=False, threshold=None)
    assert field[0].numpy().tolist() == _picture().tolist()
    assert [f"{name}: grey values cut at" in note for note in notes] == [True] * int(grey.max() != 255)


def test_a_tiff_of_several_pages_is_a_volume_and_a_threshold_can_be_given(tmp_path: Path) -> None:
    pages = np.stack([_grey().astype(np.uint8) + number for number in range(18)])
    path = _save_picture(tmp_path / "stack.tif", pages)
    (field,), notes = load_fields(str(path), NAMES, MEASURE, multiphase=False, threshold=190.0)
    assert tuple(field.shape) == (1, 18, 32, 32)
    assert field[0].numpy().tolist() == (pages > 190).astype(float).tolist()
    assert f"cut at 190 (threshold), {(pages > 190).mean():.1%} above it" in notes[0]
    with pytest.raises(DataError, match=r"threshold=300 does not divide its grey values"):
        load_fields(str(path), NAMES, MEASURE, multiphase=False, threshold=300.0)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"stack\.tif: cannot be read as a picture"):
        load_fields(str(path), NAMES, MEASURE, multiphase=False, threshold=None)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    np.save(tmp_path / "gaps.npy", _picture(12) * 2)
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY")
    np.savez(tmp_path / "many.npz", a=_picture())
    names = ("gaps.npy", "torn.npy", "many.npz", "missing.npy")
    data = ",".join(str(tmp_path / n) for n in names)
    with pytest.raises(DataError) as caught:
        load_fields(data, NAMES, MEASURE, multiphase=False, threshold=None)
    lines = str(caught.value).splitlines()
    assert "names 4 files" in lines[0]
    assert [sum(name in line for line in lines[1:]) for name in names] == [2, 1, 1, 1]


def test_three_pictures_are_for_three_directions(tmp_path: Path) -> None:
    for index in range(3):
        np.save(tmp_path / f"{index}.npy", _picture())
    np.save(tmp_path / "volume.npy", np.random.default_rng(0).integers(0, 2, (32, 32, 32)))
    files = [str(tmp_path / f"{index}.npy") for index in range(3)]
    assert len(load_fields(",".join(files), NAMES, MEASURE, multiphase=False, threshold=None)[0]) == 3
    files[1] = str(tmp_path / "volume.npy")
    with pytest.raises(DataError, match="three files must be pictures with the same number of phases"):
        load_fields(",".join(files), NAMES, MEASURE, multiphase=False, threshold=None)


def test_orientations_are_rotation_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "turned.npy", np.full((32, 40, 3), 0.5))
    ((field,), _) = load_fields(
        str(tmp_path / "turned.npy"), ["OrientationDescriptor"], MEASURE, multiphase=False, threshold=None
    )
    assert tuple(field.shape) == (3, 32, 40)
    np.save(tmp_path / "phases.npy", _picture())
    with pytest.raises(DataError, match="holds no rotation vectors"):
        load_fields(
            str(tmp_path / "phases.npy"), ["OrientationDescriptor"], MEASURE, multiphase=False, threshold=None
        )


@pytest.mark.parametrize("shape", [(4, 5, 6), (5, 6)])
def test_vtk_holds_the_numbers_in_the_order_of_its_axes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Read by hand, as the format's description says: x fastest, big-endian."""
    generator = torch.Generator().manual_seed(0)
    phases = torch.randint(0, 3, shape, generator=generator)
    field = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    path = tmp_path / "out.vtk"
    write_vtk(path, phases, field)
    content = path.read_bytes()
    assert content.startswith(b"# vtk DataFile Version 3.0\n")
    dimensions = "6 5 4" if len(shape) == 3 else "6 5 1"
    assert (
        f"\nDIMENSIONS {dimensions}\nORIGIN 0 0 0\nSPACING 1 1 1\nPOINT_DATA {phases.numel()}\n".encode()
        in content
    )
    begins = content.index(b"SCALARS phase int 1\nLOOKUP_TABLE default\n") + len(
        b"SCALARS phase int 1\nLOOKUP_TABLE default\n"
    )
    read = np.frombuffer(content, ">i4", phases.numel(), begins).reshape(shape)
    assert np.array_equal(read, phases.numpy())
    title = b"SCALARS share_1 double 1\nLOOKUP_TABLE default\n"
    begins = content.index(title) + len(title)
    assert np.array_equal(
        np.frombuffer(content, ">f8", phases.numel(), begins).reshape(shape), field[1].numpy()
    )
    assert content[begins + 8 * phases.numel() :] == b"\n"
