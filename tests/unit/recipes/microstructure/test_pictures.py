"""Pictures of microstructures: what is seen of a volume, and where."""

from __future__ import annotations

import base64
import io

import matplotlib.image
import numpy as np
import pytest
import torch

from nbgpu.recipes.microstructure.pictures import block, png, slices_of


def _pixels(uri: str) -> np.ndarray:
    content = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    pixels: np.ndarray = matplotlib.image.imread(io.BytesIO(content))
    return pixels


@pytest.mark.parametrize(
    ("face", "row", "column", "light"),
    [("top", 60, 160, 1.0), ("right", 240, 240, 0.8), ("left", 240, 80, 0.6)],
)
def test_a_block_shows_three_faces_of_a_volume(face: str, row: int, column: int, light: float) -> None:
    """The first axis goes down; the last slices across the second and the third are those in front."""
    volume = torch.zeros(8, 9, 10)
    slices = {"top": volume[0], "right": volume[:, -1], "left": volume[:, :, -1]}
    before = _pixels(block(volume, 0, 1, "gray"))
    slices[face][1:-1, 1:-1] = 1
    after = _pixels(block(volume, 0, 1, "gray"))
    changed = np.abs(after - before).max(axis=2) > 0
    assert changed[row, column]
    assert after[row, column, 0] == pytest.approx(light, abs=0.01)
    # A third of the block, but for its rim.
    assert changed.sum() / (after[..., 3] > 0).sum() == pytest.approx(0.7 / 3, abs=0.05)
    assert after[0, 0, 3] == 0


def test_slices_stand_side_by_side_each_enlarged() -> None:
    volume = torch.arange(4 * 5 * 6).view(4, 5, 6)
    slices = slices_of(volume)
    assert [tuple(s.shape) for s in slices] == [(5, 6), (4, 6), (4, 5)]
    assert torch.equal(slices[1], volume[:, 2])
    pixels = _pixels(png(slices, 0, 119, "gray"))
    # 27 x 6, 27 x 6 and 32 x 5 pixels wide, with two gaps; 27 x 5 high, the highest of the three.
    assert pixels.shape[:2] == (135, 162 + 4 + 162 + 4 + 160)
    assert pixels[134, 170, 3] == 0
    assert pixels[30, 200, 0] == pytest.approx(int(slices[1][1, 1]) / 119, abs=0.01)
