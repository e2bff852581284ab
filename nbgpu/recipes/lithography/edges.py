"""Edges of a design, and the distance along each edge's normal to where an image crosses the threshold.

A design consists of pixels, whose edges are parallel to the axes, or of polygons, whose edges may have any
direction. Lengths are in nm; pixel (row, column) covers `column` to `column + 1` pixels in x and `row` to
`row + 1` in y, and its value belongs to its centre. Between centres an image is interpolated by a cubic
spline: images formed by a lens are smooth, and linear interpolation between pixels of a quarter of the
resolution is off by some nm. Fields are periodic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from contourpy import contour_generator
from scipy.ndimage import map_coordinates, spline_filter
from torch import Tensor

from nbgpu.recipes.lithography.rasterise import Polygon

_SPACING_NM = 40.0
"""Distance between the contest's sites on an edge, and of the first and last of them from its ends."""
_SAMPLES_PER_PIXEL = 8
"""Samples per pixel along a line across an edge."""
_LINES_PER_PIXEL = 4
"""Lines per pixel of the grid on which contours are traced."""
_ROUNDING = 1e-9
"""Distance, in pixels, within which a site lies on a side between pixels."""
_BESIDE_NM = 0.01
"""Half the distance between the two points that are tested to see what lies on either side of an edge."""


@dataclass(frozen=True)
class Sites:
    """Sites on the edges of a design at which the design is compared with the printed image."""

    points_nm: np.ndarray
    """Positions of the sites, x and y: (K, 2)."""
    normals: np.ndarray
    """Unit normals, pointing out of the design: (K, 2)."""

    def __len__(self) -> int:
        return len(self.points_nm)

    def inside(self, low_nm: float, high_nm: float) -> Sites:
        """Return the sites whose x and y are both from `low_nm` up to `high_nm`."""
        kept = ((self.points_nm >= low_nm) & (self.points_nm < high_nm)).all(axis=1)
        return Sites(self.points_nm[kept], self.normals[kept])


def pixel_sites(design: Tensor, pixel_nm: float, corner_nm: float = 0.0) -> Sites:
    """Return the midpoints of the sides between pixels of at least 1/2 and pixels below it, for all rows and
    then for all columns.

    Args:
        design: the design, (H, W), 0 to 1.
        pixel_nm: the width of a pixel.
        corner_nm: sites closer than this to an end of their edge are left out.
    """
    margin = round(corner_nm / pixel_nm)

    def middles(ends: np.ndarray) -> np.ndarray:
        along, across = np.nonzero(_straight(ends, margin))
        return np.stack([across + 1.0, along + 0.5], axis=1)

    return _sites_of_pixels(design, pixel_nm, middles)


def contest_sites(design: Tensor, pixel_nm: float) -> Sites:
    """Return the sites at which the mask optimisation contest of ICCAD 2013 counts violations: every 40 nm on
    an edge of at least 80 nm, with 40 nm left out at both ends, and the middle of a shorter edge.

    Banerjee, Li and Nassif, "ICCAD-2013 CAD contest in mask optimization and benchmark suite". An edge that
    crosses the border of the field counts as two.

    Args:
        design: the design, (H, W), 0 to 1; pixels of at least 1/2 belong to it.
        pixel_nm: the width of a pixel.
    """

    def chosen(ends: np.ndarray) -> np.ndarray:
        """Return the contest's sites (K, 2), across and along the edges in pixels, on the edges between
        pixels: along axis 0 of `ends` (H, W), a run of True is one edge."""
        # A run begins where the difference along it is 1 and ends where it is -1. Padding with 0 ends runs at
        # the border of the field.
        steps = np.diff(np.pad(ends.astype(np.int8), ((1, 1), (0, 0))), axis=0).T
        across, first = np.nonzero(steps == 1)
        _, last = np.nonzero(steps == -1)
        places = [np.empty((0, 2))]
        for column, begin, end in zip(across, first, last, strict=True):
            if (end - begin) * pixel_nm < 2 * _SPACING_NM:
                along = np.array([(begin + end) / 2])
            else:
                space = _SPACING_NM / pixel_nm
                along = np.arange(begin + space, end - space + 1e-9, space)
            places.append(np.stack([np.full(len(along), column + 1.0), along], axis=1))
        return np.concatenate(places)

    return _sites_of_pixels(design, pixel_nm, chosen)


def _sites_of_pixels(design: Tensor, pixel_nm: float, places_on: Callable[[np.ndarray], np.ndarray]) -> Sites:
    """Return sites on the sides between pixels of a design and pixels beside it, for all rows and then for
    all columns.

    Args:
        design: the design, (H, W), 0 to 1.
        pixel_nm: the width of a pixel.
        places_on: returns the places (K, 2), across and along the edges in pixels, from (H, W) with the
            pixels whose far side is an edge.
    """
    wanted = design.detach().cpu().numpy() >= 0.5
    points, normals = [np.empty((0, 2))], [np.empty((0, 2))]
    for axis in (1, 0):
        inside = np.moveaxis(wanted, axis, 1)
        following = np.roll(inside, -1, axis=1)
        for ends, outward in ((~inside & following, -1.0), (inside & ~following, 1.0)):
            places = places_on(ends) * pixel_nm
            normal = np.broadcast_to([outward, 0.0], places.shape)
            points.append(places if axis == 1 else places[:, ::-1])
            normals.append(normal if axis == 1 else normal[:, ::-1])
    return Sites(np.concatenate(points), np.concatenate(normals))


def polygon_sites(
    polygons: Sequence[Polygon],
    spacing_nm: float,
    corner_nm: float = 0.0,
    field_nm: tuple[float, float] | None = None,
) -> Sites:
    """Return sites on the outline of the union of several polygons; edges inside the union get no sites.

    Args:
        polygons: the polygons, in nm, with edges in any direction.
        spacing_nm: the distance between neighbouring sites on an edge; a shorter edge has one site, in its
            middle.
        corner_nm: the length that is left out at both ends of each edge.
        field_nm: the size of the field, (width, height); sites outside it are left out.
    """
    points, normals = [np.empty((0, 2))], [np.empty((0, 2))]
    for polygon in polygons:
        steps = np.roll(polygon, -1, axis=0) - polygon
        for begin, step in zip(polygon, steps, strict=True):
            length = float(np.hypot(*step))
            usable = length - 2 * corner_nm
            if length == 0 or usable <= 0:
                continue
            num = max(1, round(usable / spacing_nm))
            way = corner_nm + (np.arange(num) + 0.5) * usable / num
            points.append(begin + way[:, None] * step / length)
            normals.append(np.tile([step[1] / length, -step[0] / length], (num, 1)))
    places, normal = np.concatenate(points), np.concatenate(normals)
    if field_nm is not None:
        kept = ((places >= 0) & (places < field_nm)).all(axis=1)
        places, normal = places[kept], normal[kept]
    # One of the two points beside an edge is inside the union and the other outside. An edge with both inside
    # lies within the union; normals that point inwards are turned round.
    right, left = (_are_inside(places + side * _BESIDE_NM * normal, polygons) for side in (1, -1))
    normal = np.where(right[:, None], -normal, normal)
    kept = right != left
    # Polygons that overlap along an edge have the same sites there.
    _, first = np.unique(np.round(places[kept], 3), axis=0, return_index=True)
    first.sort()
    return Sites(places[kept][first], normal[kept][first])


def placement_errors_nm(
    image: Tensor, threshold: float, sites: Sites, pixel_nm: float, reach_nm: float = 100.0
) -> np.ndarray:
    """Return the edge placement errors (K,): the distance along each site's normal at which the image falls
    below the threshold, positive outside the design and negative inside it.

    If there are several such places, the nearest counts; the error is NaN if there is none within reach.

    Args:
        image: an image (H, W), such as the latent image.
        threshold: the level above which the image prints.
        sites: the sites of the design.
        pixel_nm: the width of a pixel.
        reach_nm: the distance from a site within which a contour is searched for.
    """
    num = int(np.ceil(reach_nm / pixel_nm * _SAMPLES_PER_PIXEL))
    ways = np.linspace(-reach_nm, reach_nm, 2 * num + 1)
    values = _Smooth(image, pixel_nm).across(sites, ways)
    before, after = values[:, :-1], values[:, 1:]
    # Outwards along the normal, the print ends where the image falls through the threshold.
    falls = (before > threshold) & (after <= threshold)
    share = np.divide(before - threshold, before - after, out=np.zeros_like(before), where=falls)
    found = np.where(falls, ways[:-1] + share * np.diff(ways), np.inf)
    nearest = np.abs(found).argmin(axis=1)
    errors = found[np.arange(len(found)), nearest]
    return np.where(np.isfinite(errors), errors, np.nan)


@dataclass(frozen=True)
class Cut:
    """A straight line between two points, x and y in nm, along which widths are measured."""

    start_nm: tuple[float, float]
    end_nm: tuple[float, float]

    def at(self, way_nm: np.ndarray) -> np.ndarray:
        """Return the points (N, 2) at the given distances (N,) from the start."""
        start, end = np.array(self.start_nm), np.array(self.end_nm)
        return np.asarray(start + way_nm[:, None] * (end - start) / np.hypot(*(end - start)))


def stretches_nm(image: Tensor, threshold: float, cut: Cut, pixel_nm: float) -> np.ndarray:
    """Return where each printed stretch along a cut begins and ends, as distances from the cut's start:
    (N, 2).

    The differences are the critical dimensions. Only whole stretches are returned: one that begins before the
    cut or continues beyond its end is left out.
    """
    length = float(np.hypot(*np.subtract(cut.end_nm, cut.start_nm)))
    ways = np.linspace(0, length, 1 + int(np.ceil(length / pixel_nm * _SAMPLES_PER_PIXEL)))
    values = _Smooth(image, pixel_nm)(cut.at(ways))
    above = values > threshold
    index = np.flatnonzero(above[1:] != above[:-1])
    share = (threshold - values[index]) / (values[index + 1] - values[index])
    places = ways[index] + share * (ways[index + 1] - ways[index])
    # The cut begins inside a print: the first crossing ends a stretch whose beginning is unknown.
    if len(places) and above[0]:
        places = places[1:]
    return np.asarray(places[: len(places) // 2 * 2].reshape(-1, 2))


def smooth_contours_nm(image: Tensor, threshold: float, pixel_nm: float) -> list[np.ndarray]:
    """Return the lines (N, 2) along which the image (H, W) crosses the threshold, up to half a pixel beyond
    the edges of the field."""
    fine_nm = pixel_nm / _LINES_PER_PIXEL
    y, x = ((np.arange(-2, length * _LINES_PER_PIXEL + 3)) * fine_nm for length in image.shape)
    values = _Smooth(image, pixel_nm)(np.stack(np.meshgrid(x, y), axis=-1))
    return [np.asarray(line) for line in contour_generator(x, y, values).lines(threshold)]


class _Smooth:
    """An image (H, W) interpolated between its pixels."""

    def __init__(self, image: Tensor, pixel_nm: float) -> None:
        self._coefficients = spline_filter(image.detach().cpu().double().numpy(), order=3, mode="grid-wrap")
        self._pixel_nm = pixel_nm

    def __call__(self, places_nm: np.ndarray) -> np.ndarray:
        """Return the values (...) at the points (..., 2), x and y."""
        rows_and_columns = np.moveaxis(places_nm[..., ::-1], -1, 0) / self._pixel_nm - 0.5
        values = map_coordinates(
            self._coefficients, rows_and_columns, order=3, mode="grid-wrap", prefilter=False
        )
        return np.asarray(values)

    def across(self, sites: Sites, ways_nm: np.ndarray) -> np.ndarray:
        """Return the values (K, J) at the given distances (J,) from sites (K,), along their normals."""
        places, ways = sites.points_nm / self._pixel_nm, ways_nm / self._pixel_nm
        values = np.empty((len(sites), len(ways)))
        is_left = np.ones(len(sites), dtype=bool)
        for axis, outward in product((0, 1), (1.0, -1.0)):
            # Lines from sides between pixels have their points at the same places of the pixels.
            is_side = np.abs(places[:, axis] - np.rint(places[:, axis])) < _ROUNDING
            chosen = (sites.normals[:, axis] == outward) & is_side
            lines = places[chosen][:, [1 - axis, axis]]
            coefficients = self._coefficients if axis == 0 else self._coefficients.T
            values[chosen] = _along_lines(coefficients, lines, outward * ways)
            is_left &= ~chosen
        points = sites.points_nm[is_left, None, :] + ways_nm[:, None] * sites.normals[is_left, None, :]
        values[is_left] = self(points)
        return values


def _along_lines(coefficients: np.ndarray, starts: np.ndarray, ways: np.ndarray) -> np.ndarray:
    """Return the values (K, J) of a periodic spline at distances (J,) along its second axis.

    Args:
        coefficients: the spline's, (H, W).
        starts: where the lines start (K, 2), in pixels; along the second axis between two pixels.
        ways: the distances (J,), in pixels.
    """
    height, width = coefficients.shape
    # A cubic spline is a sum of four coefficients along each axis. Every line needs the same window of
    # columns around its start, so the weights along the line are one matrix for all lines.
    rows = np.floor(starts[:, :1] - 0.5).astype(np.intp) + np.arange(-1, 3)
    window = np.arange(np.floor(ways.min() - 0.5) - 1, np.floor(ways.max() - 0.5) + 3, dtype=np.intp)
    columns = np.rint(starts[:, 1:]).astype(np.intp) + window
    near = coefficients[(rows % height)[:, :, None], (columns % width)[:, None, :]]
    on_lines = np.einsum("kr,krl->kl", _cubic_spline(starts[:, :1] - 0.5 - rows), near)
    return np.asarray(on_lines @ _cubic_spline(ways - 0.5 - window[:, None]))


def _cubic_spline(distances: np.ndarray) -> np.ndarray:
    """Return the cubic B-spline at distances from its middle."""
    size = np.abs(distances)
    inner = 2 / 3 - size**2 * (1 - size / 2)
    return np.asarray(np.where(size < 1, inner, np.clip(2 - size, 0, None) ** 3 / 6))


def _straight(ends: np.ndarray, margin: int) -> np.ndarray:
    """Return, of the pixels whose far side is an edge, those where the edge continues straight for `margin`
    more pixels on both sides. An edge runs along axis 0 of `ends` (H, W, bool), which is periodic."""
    kept = ends.copy()
    for step in range(1, margin + 1):
        kept &= np.roll(ends, step, axis=0) & np.roll(ends, -step, axis=0)
    return kept


def _are_inside(points: np.ndarray, polygons: Sequence[Polygon]) -> np.ndarray:
    """Return which of the points (K, 2) are inside a polygon: a ray from such a point to the right meets the
    polygon's edges an odd number of times."""
    covered = np.zeros(len(points), dtype=bool)
    for polygon in polygons:
        near = ((points >= polygon.min(axis=0)) & (points <= polygon.max(axis=0))).all(axis=1) & ~covered
        x, y = points[near].T[:, :, None]
        (x0, y0), (x1, y1) = polygon.T, np.roll(polygon, -1, axis=0).T
        passes = (y0 > y) != (y1 > y)
        with np.errstate(divide="ignore", invalid="ignore"):
            meets = x0 + (y - y0) * (x1 - x0) / (y1 - y0)
        covered[near] = (passes & (meets > x)).sum(axis=1) % 2 == 1
    return covered
