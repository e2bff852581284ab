"""Rasterisation of polygons, with the exact share of each pixel's area that they cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix

Polygon = np.ndarray
"""Corners of a polygon in nm, (N, 2): x, y. The last corner is joined to the first."""

_UNION_PRECISION_NM = 1e-3
"""The grid to which gdstk rounds the corners of a union of polygons."""


def is_manhattan(polygon: Polygon) -> bool:
    """Return whether all edges are parallel to the axes."""
    steps = np.roll(polygon, -1, axis=0) - polygon
    return bool(((steps == 0).sum(axis=1) >= 1).all())


def rasterised(
    polygons: Sequence[Polygon], origin_nm: tuple[float, float], shape: tuple[int, int], pixel_nm: float
) -> np.ndarray:
    """Return the exact share of each pixel's area that the polygons cover, (H, W) in float32; area under
    several polygons counts once.

    Args:
        polygons: the polygons, in nm. More than one polygon with slanted edges among them needs gdstk, which
            unites those that overlap.
        origin_nm: x and y of the corner where row 0 and column 0 begin; rows advance along y, columns along
            x.
        shape: the number of pixels, (H, W). Anything outside them is cut off.
        pixel_nm: the width of a pixel.
    """
    if not polygons:
        return np.zeros(shape, dtype=np.float32)
    if all(is_manhattan(polygon) for polygon in polygons):
        return _cover_rectangles(polygons, origin_nm, shape, pixel_nm)
    return _cover_disjoint(_union(polygons) if len(polygons) > 1 else polygons, origin_nm, shape, pixel_nm)


def _cover_rectangles(
    polygons: Sequence[Polygon], origin_nm: tuple[float, float], shape: tuple[int, int], pixel_nm: float
) -> np.ndarray:
    """Return the covered shares for Manhattan polygons.

    The x and y of all corners divide the plane into a grid of cells. Each cell is covered completely, or not
    at all if its winding number is 0, so a pixel's share is the sum of its overlaps with the covered cells.
    """
    # Corners outside the image are moved to its border, which changes no pixel and keeps the grid small.
    low = np.asarray(origin_nm)
    high = low + np.array([shape[1], shape[0]]) * pixel_nm
    polygons = [polygon.clip(low, high) for polygon in polygons]
    corners = np.concatenate(polygons)
    xs, ys = np.unique(corners[:, 0]), np.unique(corners[:, 1])
    # A vertical edge adds its direction to the winding number of everything to its right, between its two
    # ends.
    turns = np.zeros((len(ys), len(xs)), dtype=np.int32)
    for polygon in polygons:
        ends = np.roll(polygon, -1, axis=0)
        if float(np.sum(polygon[:, 0] * ends[:, 1] - polygon[:, 1] * ends[:, 0])) < 0:
            # Give all polygons the same orientation: otherwise two that overlap would cancel there.
            polygon, ends = ends, polygon
        upright = polygon[:, 0] == ends[:, 0]
        x = np.searchsorted(xs, polygon[upright, 0])
        low, high = (np.searchsorted(ys, p[upright, 1]) for p in (polygon, ends))
        np.add.at(turns, (low, x), 1)
        np.add.at(turns, (high, x), -1)
    covered = turns.cumsum(axis=0).cumsum(axis=1)[:-1, :-1] != 0
    overlap_y = _overlaps(ys, origin_nm[1], shape[0], pixel_nm)
    overlap_x = _overlaps(xs, origin_nm[0], shape[1], pixel_nm)
    covered_rows = overlap_y @ covered.astype(np.float64)
    return np.asarray((overlap_x @ covered_rows.T).T / pixel_nm**2, dtype=np.float32)


def _overlaps(cuts: np.ndarray, origin_nm: float, num_pixels: int, pixel_nm: float) -> csr_matrix:
    """Return the length in nm that each pixel shares with each interval between two cuts: (num_pixels,
    len(cuts) - 1)."""
    sides = origin_nm + np.arange(num_pixels + 1) * pixel_nm
    both = np.unique(np.concatenate([sides, cuts]))
    middles = (both[1:] + both[:-1]) / 2
    pixel = np.searchsorted(sides, middles) - 1
    interval = np.searchsorted(cuts, middles) - 1
    inside = (pixel >= 0) & (pixel < num_pixels) & (interval >= 0) & (interval < len(cuts) - 1)
    size = (num_pixels, len(cuts) - 1)
    return csr_matrix((np.diff(both)[inside], (pixel[inside], interval[inside])), shape=size)


def _union(polygons: Sequence[Polygon]) -> list[Polygon]:
    """Return polygons that cover the same area without overlaps; holes are connected to the outside by two
    coincident edges."""
    import gdstk

    parts = [gdstk.Polygon([(float(x), float(y)) for x, y in polygon]) for polygon in polygons]
    return [np.asarray(part.points) for part in gdstk.boolean(parts, [], "or", precision=_UNION_PRECISION_NM)]


def _cover_disjoint(
    polygons: Sequence[Polygon], origin_nm: tuple[float, float], shape: tuple[int, int], pixel_nm: float
) -> np.ndarray:
    """Return the covered shares for polygons that do not overlap, with edges in any direction.

    Around a counter-clockwise polygon, an edge that goes up adds the area to its left, row by row, and an
    edge that goes down subtracts it. `partly` has the part of each pixel to the left of the edges that pass
    through it, and `rises` the height by which edges rise in each pixel, which covers all pixels to the left.
    """
    height, width = shape
    partly, rises = np.zeros((height, width)), np.zeros((height, width + 1))
    for polygon in polygons:
        corners = (polygon - np.asarray(origin_nm)) / pixel_nm
        ends = np.roll(corners, -1, axis=0)
        if float(np.sum(corners[:, 0] * ends[:, 1] - corners[:, 1] * ends[:, 0])) < 0:
            corners, ends = ends, corners
        for begin, end in zip(corners, ends, strict=True):
            if begin[1] == end[1]:
                continue
            # The pieces of the edge, one in each pixel, by their midpoints and heights.
            ends_of_pieces = _cut_by_pixels(begin, end, shape)
            x, y = ((ends_of_pieces[1:] + ends_of_pieces[:-1]) / 2).T
            rise = np.diff(ends_of_pieces[:, 1])
            row, column = np.floor(y).astype(int), np.floor(x).astype(int)
            is_seen = (row >= 0) & (row < height) & (column >= 0)
            np.add.at(rises, (row[is_seen], column[is_seen].clip(max=width)), rise[is_seen])
            inside = is_seen & (column < width)
            np.add.at(partly, (row[inside], column[inside]), (rise * (x - column))[inside])
    # Sum the rises of all edges to the right of each pixel.
    whole = rises[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    return np.asarray((whole + partly).clip(0, 1), dtype=np.float32)


def _cut_by_pixels(begin: np.ndarray, end: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the points (N, 2), x and y in pixels, at which an edge crosses from one pixel of the image
    (height, width) to the next, including its ends."""
    # As fractions of the way from begin to end.
    fractions = [np.array([0.0, 1.0])]
    for axis, length in ((0, shape[1]), (1, shape[0])):
        low, high = sorted((begin[axis], end[axis]))
        borders = np.arange(max(0, np.ceil(low)), min(length, np.floor(high)) + 1)
        if high > low:
            fractions.append((borders - begin[axis]) / (end[axis] - begin[axis]))
    fraction = np.unique(np.concatenate(fractions).clip(0, 1))
    return np.asarray(begin + fraction[:, None] * (end - begin))
