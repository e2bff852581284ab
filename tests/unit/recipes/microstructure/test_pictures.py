"""Pictures of microstructures: what is seen of a volume, and where."""

from __future__ import annotations

import base64
import io

import matplotlib.image
import numpy as np
import pytest
import torch

from nbgpu.recipes.microstructure.pictures import block, middle_slices
from nbgpu.recipes.side_by_side import Colours

GREYS = Colours("share", 0, 1)


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
    before = _pixels(block(volume, GREYS))
    slices[face][1:-1, 1:-1] = 1
    after = _pixels(block(volume, GREYS))
    changed = np.abs(after - before).max(axis=2) > 0
    # The names of the edges stand in a margin of 20 pixels.
    row, column = row + 20, column + 20
    assert changed[row, column]
    assert after[row, column, 0] == pytest.approx(light, abs=0.01)
    # A third of the block, but for its rim.
    whole = 320 * 370 * 3 / 4
    assert changed.sum() / whole == pytest.approx(0.7 / 3, abs=0.05)


def test_slices_are_across_the_middle_of_each_axis() -> None:
    volume = torch.arange(4 * 5 * 6).view(4, 5, 6)
    slices = middle_slices(volume)
    assert [tuple(s.shape) for s in slices] == [(5, 6), (4, 6), (4, 5)]
    assert torch.equal(slices[1], volume[:, 2])
