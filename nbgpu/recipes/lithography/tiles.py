"""Layouts cut into masks of equal size, each with what surrounds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.recipes.lithography.layouts import read_layout
from nbgpu.recipes.lithography.pairs import Pair
from nbgpu.recipes.lithography.rasterise import rasterised

_NUM_REGIONS = 20


def tiles(path: Path, layer: str, size: int, pixel_nm: float, margin: int = 0) -> list[Pair]:
    """Return the masks of a layout: its bounding box is centred on whole tiles of size x size pixels, and
    empty tiles are left out.

    The simulation continues a mask periodically. With a margin, each mask has beside its tile that many
    pixels of the layout on every side, so that what lies beyond the tile's edges has its part in the image.

    Raises:
        DataError: see `read_layout`.
    """
    polygons = read_layout(path, layer)
    corners = np.concatenate(polygons)
    low, high = corners.min(axis=0), corners.max(axis=0)
    edge_nm = size * pixel_nm
    columns, rows = (max(1, math.ceil((b - a) / edge_nm)) for a, b in zip(low, high, strict=True))
    begin = (low + high - np.array([columns, rows]) * edge_nm) / 2 - margin * pixel_nm
    shape = (rows * size + 2 * margin, columns * size + 2 * margin)
    whole = torch.from_numpy(rasterised(polygons, (float(begin[0]), float(begin[1])), shape, pixel_nm))
    cut = whole.unfold(0, size + 2 * margin, size).unfold(1, size + 2 * margin, size)
    # Some twenty regions, so that a fifth of them can be held out; a small layout has smaller ones.
    edge = max(1, math.isqrt(rows * columns // _NUM_REGIONS))
    return [
        Pair(
            f"{path} row {row} column {column}",
            cut[row, column][None].clone(),
            layout=path,
            origin_nm=(
                float(begin[0]) + (column * size + margin) * pixel_nm,
                float(begin[1]) + (row * size + margin) * pixel_nm,
            ),
            region=f"{path} rows from {row // edge * edge}, columns from {column // edge * edge}",
        )
        for row in range(rows)
        for column in range(columns)
        if bool(without_margin(cut[row, column], margin).any())
    ]


def without_margin(field: Tensor, margin: int) -> Tensor:
    """Return the inner pixels (..., h, w) of a field (..., h + 2 margin, w + 2 margin)."""
    return field[..., margin : field.shape[-2] - margin, margin : field.shape[-1] - margin]


def distinct(pairs: Sequence[Pair], margin: int = 0) -> list[Pair]:
    """Return the pairs without those whose mask equals an earlier one, margins not counted: a layout repeats
    its cells, and a repeated tile would be in training and held out at the same time.

    Masks in files are all kept.
    """
    seen: set[bytes] = set()
    kept = []
    for pair in pairs:
        if isinstance(pair.mask, Tensor):
            pixels = without_margin(pair.mask, margin).contiguous().numpy().tobytes()
            if pixels in seen:
                continue
            seen.add(pixels)
        kept.append(pair)
    return kept


def tiles_of_all(paths: list[Path], layer: str, size: int, pixel_nm: float, margin: int = 0) -> list[Pair]:
    """Return the masks of several layouts.

    Raises:
        DataError: everything that is wrong with any of them.
    """
    found: list[Pair] = []
    problems: list[str] = []
    for path in paths:
        try:
            found += tiles(path, layer, size, pixel_nm, margin)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return found
