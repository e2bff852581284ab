"""Layouts cut into masks of equal size."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from nbgpu.errors import DataError
from nbgpu.recipes.lithography.layouts import read_layout
from nbgpu.recipes.lithography.pairs import Pair
from nbgpu.recipes.lithography.rasterise import rasterised


def tiles(path: Path, layer: str, size: int, pixel_nm: float) -> list[Pair]:
    """Return the masks of a layout: its bounding box is centred on whole tiles of size x size pixels, and
    empty tiles are left out.

    The simulation of a tile's image continues the tile periodically and ignores what the layout has beyond
    the tile's edges.

    Raises:
        DataError: see `read_layout`.
    """
    polygons = read_layout(path, layer)
    corners = np.concatenate(polygons)
    low, high = corners.min(axis=0), corners.max(axis=0)
    edge_nm = size * pixel_nm
    columns, rows = (max(1, math.ceil((b - a) / edge_nm)) for a, b in zip(low, high, strict=True))
    begin = (low + high - np.array([columns, rows]) * edge_nm) / 2
    whole = rasterised(polygons, (float(begin[0]), float(begin[1])), (rows * size, columns * size), pixel_nm)
    cut = torch.from_numpy(whole).view(rows, size, columns, size).transpose(1, 2)
    return [
        Pair(f"{path} row {row} column {column}", cut[row, column][None].clone())
        for row in range(rows)
        for column in range(columns)
        if bool(cut[row, column].any())
    ]


def tiles_of_all(paths: list[Path], layer: str, size: int, pixel_nm: float) -> list[Pair]:
    """Return the masks of several layouts.

    Raises:
        DataError: everything that is wrong with any of them.
    """
    found: list[Pair] = []
    problems: list[str] = []
    for path in paths:
        try:
            found += tiles(path, layer, size, pixel_nm)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return found
