"""The modality that is made of a case lies on the case's own grid, in the case's own intensities."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nbgpu.config import train_config
from nbgpu.errors import DataError
from nbgpu.recipes.diffusion.config import DiffusionConfig
from nbgpu.recipes.diffusion.files import Cube
from nbgpu.recipes.diffusion.recipe import Diffusion

LEFT_BACK = np.array([[-1.0, 0, 0, 90], [0, -1, 0, 126], [0, 0, 2, -72], [0, 0, 0, 1]])
INSIDE = (slice(4, 18), slice(2, 22), slice(3, 15))
ENDINGS = {"2023": "-{}.nii.gz", "2020": "_{}.nii.gz"}
OLD = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair"}


def _case(root: Path, naming: str = "2023", without: str = "t1c") -> dict[str, np.ndarray]:
    """Write a case whose modalities are one image in four scales; return them, also the missing one."""
    x, y, z = np.meshgrid(*(np.linspace(0, 3, n) for n in (14, 20, 12)), indexing="ij")
    image = np.zeros((20, 24, 16), dtype=np.float32)
    image[INSIDE] = 1.5 + np.sin(x) * np.cos(y) * np.sin(z)
    name = "BraTS-GLI-00001-000" if naming == "2023" else "BraTS20_Training_001"
    (root / name).mkdir(parents=True)
    volumes = {kind: image * scale for kind, scale in zip(OLD, (100, 200, 300, 400), strict=True)}
    for kind, volume in volumes.items():
        if kind != without:
            file = ENDINGS[naming].format(kind if naming == "2023" else OLD[kind])
            nibabel.save(nibabel.Nifti1Image(volume, LEFT_BACK), root / name / f"{name}{file}")
    return volumes


class Copies(nn.Module):
    """Answers with the first of the given modalities, whatever the time and the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x[:, 1:2]


def _predicted(root: Path, out: Path, **settings: object) -> tuple[nibabel.Nifti1Image, dict[str, float]]:
    config = train_config("diffusion", target="t1c", sampling_steps=2, **settings)
    assert isinstance(config, DiffusionConfig)
    recipe = Diffusion(config)
    (sample,), problems = recipe.new_samples(str(root))
    assert problems == []
    out.mkdir()
    predicted = recipe.predict(Copies(), torch.device("cpu"), sample, out / "case")
    (path,) = predicted.files
    image = nibabel.load(path)
    assert isinstance(image, nibabel.Nifti1Image)
    return image, dict(predicted.values)


@pytest.mark.parametrize(
    ("fit", "size", "largest"), [("crop", 24, 0.02), ("resize", 20, 0.02), ("resize", 16, 0.2)]
)
def test_it_has_the_grid_and_the_intensities_of_the_others(
    tmp_path: Path, fit: str, size: int, largest: float
) -> None:
    volumes = _case(tmp_path / "data")
    made, values = _predicted(
        tmp_path / "data", tmp_path / "out", data="phantoms_are_not_read", fit=fit, size=size
    )
    np.testing.assert_allclose(made.affine, LEFT_BACK)
    voxels = made.get_fdata()
    # What the network copied, in the mean of the three scales; the outermost percentiles are cut.
    low, high = (np.percentile(volumes["t1n"][INSIDE], q) for q in (1, 99))
    mean = np.clip(volumes["t1n"], low, high) / 100 * (100 + 300 + 400) / 3
    difference = np.abs(voxels - mean)[INSIDE] / mean[INSIDE].mean()
    assert difference.mean() < largest / 4
    assert difference.max() < largest
    assert not voxels[volumes["t1n"] == 0].any()
    assert values == {
        "low": pytest.approx(low * 8 / 3, rel=1e-3),
        "high": pytest.approx(high * 8 / 3, rel=1e-3),
    }


def test_what_the_cube_does_not_reach_is_zero_and_said(tmp_path: Path) -> None:
    volumes = _case(tmp_path / "data")
    made, values = _predicted(tmp_path / "data", tmp_path / "out", data="x", fit="crop", size=16)
    in_cube = 14 * 16 * 12
    assert np.count_nonzero(made.get_fdata()) == in_cube
    assert values["brain_outside"] == pytest.approx(1 - in_cube / np.count_nonzero(volumes["t1n"]), abs=1e-4)


def test_a_case_with_the_modality_is_measured_and_names_follow_the_data(tmp_path: Path) -> None:
    _case(tmp_path / "new", without="")
    _, values = _predicted(tmp_path / "new", tmp_path / "out", data="x", size=20)
    # The copied modality is the true one in another scale.
    assert values["psnr_db"] > 60
    _case(tmp_path / "old", naming="2020")
    config = train_config("diffusion", target="t1c", sampling_steps=2, data="x", size=16)
    recipe = Diffusion(config)
    ((sample,), _) = recipe.new_samples(str(tmp_path / "old"))
    predicted = recipe.predict(Copies(), torch.device("cpu"), sample, tmp_path / "BraTS20_Training_001")
    assert [path.name for path in predicted.files] == ["BraTS20_Training_001_t1ce.nii.gz"]


def test_a_case_that_lacks_another_modality_is_named(tmp_path: Path) -> None:
    _case(tmp_path / "data", without="t2w")
    recipe = Diffusion(train_config("diffusion", target="t1c", data="x"))
    samples, problems = recipe.new_samples(str(tmp_path / "data"))
    assert not samples
    assert len(problems) == 1
    assert "has no t2w" in problems[0]
    with pytest.raises(DataError, match="no such folder"):
        recipe.new_samples(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("edge", [5, 8, 12, 13])
@pytest.mark.parametrize("shape", [(9, 12, 7), (13, 13, 13), (4, 20, 9)])
def test_a_cube_that_is_cut_comes_back_voxel_by_voxel(shape: tuple[int, int, int], edge: int) -> None:
    volume = torch.full((1, 15, 22, 14), -1.0)
    box = (slice(1, 1 + shape[0]), slice(2, 2 + shape[1]), slice(0, shape[2]))
    volume[(slice(None), *box)] = torch.rand(1, *shape)
    cube = Cube.around(volume, edge, "crop")
    back = cube.placed(cube.cut(volume, -1.0, "trilinear"), -1.0)
    kept = torch.tensor([min(edge, n) for n in shape]).prod()
    assert int((back != -1).sum()) == int(kept)
    torch.testing.assert_close(back[back != -1], volume[back != -1], rtol=0, atol=0)
