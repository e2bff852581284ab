"""Layouts cut into masks of equal size, each with a margin of the surrounding layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.machine import cgroups
from nbgpu.recipes.lithography.layouts import read_layout
from nbgpu.recipes.lithography.pairs import Pair
from nbgpu.recipes.lithography.rasterise import rasterised
from nbgpu.text import sizes

_NUM_REGIONS = 20
"""The number of square regions that a layout is divided into, about: whole regions are held out."""


def tiles(
    path: Path, layer: str, size: int, pixel_nm: float, margin: int = 0, *, cell: str = ""
) -> list[Pair]:
    """Cut a layout into masks: tiles of size x size pixels, whose grid is centred on the layout's bounding
    box. Empty tiles are left out.

    The simulation continues a mask periodically. With a margin, each mask has that many pixels of the layout
    on every side of its tile, so that shapes beyond the tile's edges contribute to the image. A mask has the
    shape (1, size + 2 margin, size + 2 margin), and row 0 is the lowest. Each tile is rasterised by itself,
    so that no memory is spent on empty area.

    Raises:
        DataError: see `read_layout`; or the masks would take more than half of the host's free memory.
    """
    polygons = read_layout(path, layer, cell)
    lows = np.array([polygon.min(axis=0) for polygon in polygons])
    highs = np.array([polygon.max(axis=0) for polygon in polygons])
    low, high = lows.min(axis=0), highs.max(axis=0)
    edge_nm = size * pixel_nm
    columns, rows = (max(1, math.ceil((b - a) / edge_nm)) for a, b in zip(low, high, strict=True))
    origin = (low + high - np.array([columns, rows]) * edge_nm) / 2
    field = size + 2 * margin
    # A mask is float32, and the masks may take half of the free memory.
    max_tiles = cgroups.free_memory_bytes() // 2 // (4 * field * field)
    lows, highs = (lows - origin) / edge_nm, (highs - origin) / edge_nm
    touched = _tiles_touched(lows, highs, (columns, rows), max_tiles)
    if touched is None:
        width, height = (high - low) / 1000
        raise DataError(
            f"{path}: covers {width:.4g} x {height:.4g} um; as masks of {field} x {field} pixels of {pixel_nm:g} nm, with "
            f"margins, it takes more than half of the {sizes.in_words(cgroups.free_memory_bytes())} of memory that are free. "
            "Name a smaller cell, or take a larger pixel_nm"
        )
    # The polygons that reach into each tile or its margins.
    reach = margin / size
    with_margins = _tiles_touched(lows - reach, highs + reach, (columns, rows), None)
    assert with_margins is not None
    # The edge of a region, in tiles. A layout of fewer than twenty tiles has regions of one tile.
    region_tiles = max(1, math.isqrt(rows * columns // _NUM_REGIONS))
    pairs = []
    for row, column in sorted(touched):
        x, y = origin + np.array([column, row]) * edge_nm
        corner = (float(x) - margin * pixel_nm, float(y) - margin * pixel_nm)
        near = [polygons[number] for number in with_margins[row, column]]
        mask = torch.from_numpy(rasterised(near, corner, (field, field), pixel_nm))[None]
        if not bool(without_margin(mask, margin).any()):
            continue
        pairs.append(
            Pair(
                f"{path} row {row} column {column}",
                mask,
                layout=path,
                origin_nm=(float(x), float(y)),
                region=f"{path} rows from {row // region_tiles * region_tiles}, columns from {column // region_tiles * region_tiles}",
            )
        )
    return pairs


def _tiles_touched(
    lows: np.ndarray, highs: np.ndarray, num_tiles: tuple[int, int], max_tiles: int | None
) -> dict[tuple[int, int], list[int]] | None:
    """Return the numbers of the polygons whose bounding box touches a tile, by (row, column); None if more
    than `max_tiles` tiles are touched.

    Args:
        lows, highs: the corners of the bounding boxes, (N, 2): x, y, in tiles from the first tile's corner.
        num_tiles: the columns and rows of the layout.
        max_tiles: the largest number of tiles; None for no limit.
    """
    firsts = np.floor(lows).astype(int).clip(min=0)
    ends = np.minimum(np.floor(highs).astype(int) + 1, num_tiles)
    touched: dict[tuple[int, int], list[int]] = {}
    for number, ((left, bottom), (right, top)) in enumerate(zip(firsts, ends, strict=True)):
        # A single polygon can touch too many tiles to enumerate them.
        if max_tiles is not None and int(right - left) * int(top - bottom) > max_tiles:
            return None
        for row in range(bottom, top):
            for column in range(left, right):
                touched.setdefault((row, column), []).append(number)
        if max_tiles is not None and len(touched) > max_tiles:
            return None
    return touched


def without_margin(field: Tensor, margin: int) -> Tensor:
    """Return the inner pixels (..., h, w) of a field (..., h + 2 margin, w + 2 margin)."""
    return field[..., margin : field.shape[-2] - margin, margin : field.shape[-1] - margin]


def distinct(pairs: Sequence[Pair], margin: int = 0) -> list[Pair]:
    """Drop pairs whose mask, without margins, equals an earlier one: a layout repeats its cells, and equal
    tiles could be both in the training and in the held-out part. Masks in files are all kept."""
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


def tiles_of_all(
    paths: list[Path], layer: str, size: int, pixel_nm: float, margin: int = 0, *, cell: str = ""
) -> list[Pair]:
    """Return the masks of several layouts.

    Raises:
        DataError: everything that is wrong with any of them.
    """
    pairs: list[Pair] = []
    problems: list[str] = []
    for path in paths:
        try:
            pairs += tiles(path, layer, size, pixel_nm, margin, cell=cell)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return pairs
