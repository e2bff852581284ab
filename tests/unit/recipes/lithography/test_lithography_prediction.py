"""What a mask prints lies where the layout has it."""

from __future__ import annotations

import json
from pathlib import Path

import gdstk
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nbgpu.config import train_config
from nbgpu.errors import DataError
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.recipe import Lithography
from nbgpu.run_folder.predictions import Job, Row

PIXEL_NM = 25.0
ORIGIN_NM = (5000.0, -3000.0)
FRAME = [(5400.0, -2700.0, 300.0, 300.0), (5475.0, -2625.0, 150.0, 150.0)]
BOXES = [(5100.0, -2800.0, 250.0, 200.0), (6000.0, -2000.0, 300.0, 400.0), (5700.0, -2900.0, 200.0, 150.0)]


class Copies(nn.Module):
    """Answers with the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, mask: Tensor) -> Tensor:
        return mask


def _rectangle(x: float, y: float, width: float, height: float) -> gdstk.Polygon:
    return gdstk.rectangle((x, y), (x + width, y + height))


def _layout(path: Path) -> gdstk.Cell:
    """A layout of 64 by 64 pixels that begins far from the origin, with three boxes and a frame with a hole;
    one box lies in two tiles, and one tile is empty."""
    library = gdstk.Library(unit=1e-9, precision=1e-12)
    cell = library.new_cell("top")
    x, y = ORIGIN_NM
    shapes = [*map(_rectangle, *zip(*BOXES, strict=True))]
    shapes += gdstk.boolean(_rectangle(*FRAME[0]), _rectangle(*FRAME[1]), "not")
    # Two corners give the layout its extent.
    cell.add(*shapes, _rectangle(x, y, 25, 25), _rectangle(x + 1575, y + 1575, 25, 25))
    library.write_gds(path)
    return cell


def _recipe(data: str, **settings: object) -> Lithography:
    config = train_config(
        "lithography",
        **{"data": data, "size": 32, "pixel_nm": PIXEL_NM, "layer": "0/0", "kernel_nm": 100.0, **settings},
    )
    assert isinstance(config, LithographyConfig)
    return Lithography(config)


def test_contours_are_the_shapes_of_the_layout(tmp_path: Path) -> None:
    layout, out = tmp_path / "chip 1.gds", tmp_path / "out"
    cell = _layout(layout)
    out.mkdir()
    recipe = _recipe(str(layout), resist_threshold=0.5, diffusion_nm=0.0)
    samples, problems = recipe.new_samples(str(layout))
    assert problems == []
    assert len(samples) == 3
    rows = []
    for number, sample in enumerate(samples):
        found = recipe.predict(Copies(), torch.device("cpu"), sample, out / f"tile-{number}")
        assert {path.suffix for path in found.files} == {".npy", ".json", ".png"}
        rows.append(Row(str(sample["name"]), 0, found.values, [p.name for p in found.files], found.aside))
        mask = np.load(out / f"tile-{number}.aerial.npy")
        assert found.values["printed_share"] == pytest.approx((mask > 0.5).mean(), abs=1e-5)

    columns, notes = recipe.conclude(rows, [], Job("run", "checkpoint", str(layout), str(out)))
    assert columns == {}
    assert "contours.gds" in notes[0]
    (made,) = gdstk.read_gds(out / "contours.gds").top_level()
    assert made.name == "chip_1"
    # Half a pixel is cut off each corner, and where tiles meet a gap of a pixel is left.
    difference = gdstk.boolean(made.polygons, cell.polygons, "xor", precision=1e-3)
    outline_nm = sum(2 * (w + h) for _, _, w, h in (*BOXES, *FRAME))
    assert sum(polygon.area() for polygon in difference) < outline_nm * PIXEL_NM / 4
    hole = FRAME[1][0] + 75, FRAME[1][1] + 75
    assert not any(polygon.contain(hole) for polygon in made.polygons)
    assert any(polygon.contain((FRAME[0][0] + 40, FRAME[0][1] + 40)) for polygon in made.polygons)


def test_contours_of_a_mask_without_a_layout_begin_at_zero(tmp_path: Path) -> None:
    recipe = _recipe("generated", layer="", num_masks=8)
    samples, _ = recipe.new_samples("generated")
    found = recipe.predict(Copies(), torch.device("cpu"), samples[0], tmp_path / "mask")
    assert {"printed_share", "mse", "iou"} == set(found.values)
    (contours,) = [path for path in found.files if path.suffix == ".json"]
    polygons = json.loads(contours.read_text())
    assert polygons["unit"] == "nm"
    corners = np.concatenate([ring for polygon in polygons["polygons"] for ring in polygon])
    assert corners.min() >= 0
    assert corners.max() <= 32 * PIXEL_NM
    assert recipe.conclude([], [], Job("run", "checkpoint", "generated", str(tmp_path))) == ({}, [])


def test_masks_that_are_smaller_than_the_kernels_are_refused(tmp_path: Path) -> None:
    layout, masks = tmp_path / "chip.gds", tmp_path / "masks.npz"
    _layout(layout)
    np.savez(masks, masks=np.zeros((2, 32, 32), np.float32), aerials=np.zeros((2, 32, 32), np.float32))
    recipe = _recipe(str(layout), kernel_nm=1000.0)
    with pytest.raises(DataError, match="have 41 pixels, and the masks with their margins 32"):
        recipe.new_samples(str(masks))
