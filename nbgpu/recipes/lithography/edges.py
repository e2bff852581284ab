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
_SIDE_TOLERANCE = 1e-9
"""Distance, in pixels, within which a site counts as lying on a side between pixels."""
_PROBE_NM = 0.01
"""Distance from an edge of the two points that show which side of the edge is inside the design."""


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
    """Return the midpoint of each pixel side at an edge of the design, between a pixel of at least 1/2 and
    one below it: first those along rows, then those along columns.

    Args:
        design: the design, (H, W), 0 to 1.
        pixel_nm: the width of a pixel.
        corner_nm: sites closer than this to an end of their edge are left out.
    """
    margin = round(corner_nm / pixel_nm)

    def midpoints(ends: np.ndarray) -> np.ndarray:
        along, across = np.nonzero(_straight_edges(ends, margin))
        return np.stack([across + 1.0, along + 0.5], axis=1)

    return _sites_of_pixels(design, pixel_nm, midpoints)


def contest_sites(design: Tensor, pixel_nm: float) -> Sites:
    """Return the sites at which the mask optimisation contest of ICCAD 2013 counts violations: every 40 nm on
    an edge of at least 80 nm, with 40 nm left out at both ends, and the middle of a shorter edge.

    Banerjee, Li and Nassif, "ICCAD-2013 CAD contest in mask optimization and benchmark suite". An edge that
    crosses the border of the field counts as two.

    Args:
        design: the design, (H, W), 0 to 1; pixels of at least 1/2 belong to it.
        pixel_nm: the width of a pixel.
    """

    def contest_places(ends: np.ndarray) -> np.ndarray:
        """Return the contest's sites (K, 2), across and along the edges in pixels. A run of True along axis 0
        of `ends` (H, W) is one edge."""
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

    return _sites_of_pixels(design, pixel_nm, contest_places)


def _sites_of_pixels(design: Tensor, pixel_nm: float, place: Callable[[np.ndarray], np.ndarray]) -> Sites:
    """Return sites on the sides between pixels of a design and pixels outside it: first on edges across rows,
    then on edges across columns.

    Args:
        design: the design, (H, W), 0 to 1; pixels of at least 1/2 belong to it.
        pixel_nm: the width of a pixel.
        place: chooses the sites (K, 2), as coordinates across and along the edges in pixels, from a mask
            (H, W) of the pixels whose far side is an edge; edges run along axis 0 of the mask.
    """
    is_design = design.detach().cpu().numpy() >= 0.5
    points, normals = [np.empty((0, 2))], [np.empty((0, 2))]
    for axis in (1, 0):
        inside = np.moveaxis(is_design, axis, 1)
        next_inside = np.roll(inside, -1, axis=1)
        for ends, outward in ((~inside & next_inside, -1.0), (inside & ~next_inside, 1.0)):
            places = place(ends) * pixel_nm
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
    """Return sites on the outline of the union of several polygons, without edges inside the union.

    Args:
        polygons: the polygons, in nm, with edges in any direction.
        spacing_nm: the distance between neighbouring sites on an edge; a shorter edge has one site, in its
            middle.
        corner_nm: the length that is left out at both ends of each edge.
        field_nm: the size of the field, (width, height); sites outside it are left out.
    """
    # Sites on all edges, each with one of its edge's two normals.
    points, normals = [np.empty((0, 2))], [np.empty((0, 2))]
    for polygon in polygons:
        edges = np.roll(polygon, -1, axis=0) - polygon
        for begin, edge in zip(polygon, edges, strict=True):
            length = float(np.hypot(*edge))
            usable = length - 2 * corner_nm
            if length == 0 or usable <= 0:
                continue
            num_sites = max(1, round(usable / spacing_nm))
            distances = corner_nm + (np.arange(num_sites) + 0.5) * usable / num_sites
            points.append(begin + distances[:, None] * edge / length)
            normals.append(np.tile([edge[1] / length, -edge[0] / length], (num_sites, 1)))
    places, normal = np.concatenate(points), np.concatenate(normals)
    if field_nm is not None:
        kept = ((places >= 0) & (places < field_nm)).all(axis=1)
        places, normal = places[kept], normal[kept]
    # At an edge of the union, one of the two points beside the edge is inside and the other outside. Other
    # edges are dropped, and normals that point inwards are reversed.
    right, left = (_inside_polygons(places + side * _PROBE_NM * normal, polygons) for side in (1, -1))
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
    num_samples = int(np.ceil(reach_nm / pixel_nm * _SAMPLES_PER_PIXEL))
    distances = np.linspace(-reach_nm, reach_nm, 2 * num_samples + 1)
    values = _SplineImage(image, pixel_nm).across(sites, distances)
    before, after = values[:, :-1], values[:, 1:]
    # Outwards along the normal, the print ends where the image falls through the threshold.
    falls = (before > threshold) & (after <= threshold)
    share = np.divide(before - threshold, before - after, out=np.zeros_like(before), where=falls)
    edges = np.where(falls, distances[:-1] + share * np.diff(distances), np.inf)
    errors = edges[np.arange(len(edges)), np.abs(edges).argmin(axis=1)]
    return np.where(np.isfinite(errors), errors, np.nan)


@dataclass(frozen=True)
class Cut:
    """A straight line between two points, x and y in nm, along which widths are measured."""

    start_nm: tuple[float, float]
    end_nm: tuple[float, float]

    def at(self, distances_nm: np.ndarray) -> np.ndarray:
        """Return the points (N, 2) at the given distances (N,) from the start."""
        start, end = np.array(self.start_nm), np.array(self.end_nm)
        return np.asarray(start + distances_nm[:, None] * (end - start) / np.hypot(*(end - start)))


def stretches_nm(image: Tensor, threshold: float, cut: Cut, pixel_nm: float) -> np.ndarray:
    """Return where each printed stretch along a cut begins and ends, as distances from the cut's start:
    (N, 2).

    The differences are the critical dimensions. Only whole stretches are returned: one that begins before the
    cut or continues beyond its end is left out.
    """
    length = float(np.hypot(*np.subtract(cut.end_nm, cut.start_nm)))
    distances = np.linspace(0, length, 1 + int(np.ceil(length / pixel_nm * _SAMPLES_PER_PIXEL)))
    values = _SplineImage(image, pixel_nm)(cut.at(distances))
    above = values > threshold
    index = np.flatnonzero(above[1:] != above[:-1])
    share = (threshold - values[index]) / (values[index + 1] - values[index])
    crossings = distances[index] + share * (distances[index + 1] - distances[index])
    # The cut begins inside a print: the first crossing ends a stretch whose beginning is unknown.
    if len(crossings) and above[0]:
        crossings = crossings[1:]
    # A last crossing without a partner begins a stretch that continues beyond the cut's end.
    return np.asarray(crossings[: len(crossings) // 2 * 2].reshape(-1, 2))


def smooth_contours_nm(image: Tensor, threshold: float, pixel_nm: float) -> list[np.ndarray]:
    """Return the lines (N, 2) along which the image (H, W) crosses the threshold, up to half a pixel beyond
    the edges of the field."""
    fine_nm = pixel_nm / _LINES_PER_PIXEL
    y, x = ((np.arange(-2, length * _LINES_PER_PIXEL + 3)) * fine_nm for length in image.shape)
    values = _SplineImage(image, pixel_nm)(np.stack(np.meshgrid(x, y), axis=-1))
    return [np.asarray(line) for line in contour_generator(x, y, values).lines(threshold)]


class _SplineImage:
    """A periodic image (H, W), interpolated between its pixels by a cubic spline."""

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

    def across(self, sites: Sites, distances_nm: np.ndarray) -> np.ndarray:
        """Return the values (K, J) at the given distances (J,) from sites (K,), along their normals."""
        places, distances = sites.points_nm / self._pixel_nm, distances_nm / self._pixel_nm
        values = np.empty((len(sites), len(distances)))
        is_left = np.ones(len(sites), dtype=bool)
        for axis, outward in product((0, 1), (1.0, -1.0)):
            # All lines that begin on a pixel side and run along an axis need the same weights, and are
            # evaluated together by a matrix product.
            is_side = np.abs(places[:, axis] - np.rint(places[:, axis])) < _SIDE_TOLERANCE
            chosen = (sites.normals[:, axis] == outward) & is_side
            starts = places[chosen][:, [1 - axis, axis]]
            coefficients = self._coefficients if axis == 0 else self._coefficients.T
            values[chosen] = _along_lines(coefficients, starts, outward * distances)
            is_left &= ~chosen
        points = sites.points_nm[is_left, None, :] + distances_nm[:, None] * sites.normals[is_left, None, :]
        values[is_left] = self(points)
        return values


def _along_lines(coefficients: np.ndarray, starts: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return the values (K, J) of a periodic spline at distances (J,) along its second axis.

    Args:
        coefficients: the spline's, (H, W).
        starts: the points (K, 2) at which the lines start, in pixels; along the second axis between two
            pixels.
        distances: the distances (J,) from the starts, in pixels.
    """
    height, width = coefficients.shape
    # A cubic spline is a sum of four coefficients along each axis. Every line needs the same window of
    # columns around its start, so the weights along the line are one matrix for all lines.
    rows = np.floor(starts[:, :1] - 0.5).astype(np.intp) + np.arange(-1, 3)
    window = np.arange(
        np.floor(distances.min() - 0.5) - 1, np.floor(distances.max() - 0.5) + 3, dtype=np.intp
    )
    columns = np.rint(starts[:, 1:]).astype(np.intp) + window
    near = coefficients[(rows % height)[:, :, None], (columns % width)[:, None, :]]
    on_lines = np.einsum("kr,krl->kl", _cubic_spline(starts[:, :1] - 0.5 - rows), near)
    return np.asarray(on_lines @ _cubic_spline(distances - 0.5 - window[:, None]))


def _cubic_spline(distances: np.ndarray) -> np.ndarray:
    """Return the cubic B-spline at distances from its middle."""
    size = np.abs(distances)
    inner = 2 / 3 - size**2 * (1 - size / 2)
    return np.asarray(np.where(size < 1, inner, np.clip(2 - size, 0, None) ** 3 / 6))


def _straight_edges(ends: np.ndarray, margin: int) -> np.ndarray:
    """Return which pixels lie on an edge that continues straight for `margin` more pixels on both sides.

    Args:
        ends: (H, W), whether the far side of a pixel is an edge; edges run along axis 0, which is periodic.
        margin: the number of pixels.
    """
    kept = ends.copy()
    for step in range(1, margin + 1):
        kept &= np.roll(ends, step, axis=0) & np.roll(ends, -step, axis=0)
    return kept


def _inside_polygons(points: np.ndarray, polygons: Sequence[Polygon]) -> np.ndarray:
    """Return which of the points (K, 2) are inside a polygon: those from which a ray to the right crosses the
    polygon's edges an odd number of times."""
    is_inside = np.zeros(len(points), dtype=bool)
    for polygon in polygons:
        near = ((points >= polygon.min(axis=0)) & (points <= polygon.max(axis=0))).all(axis=1) & ~is_inside
        x, y = points[near].T[:, :, None]
        (x0, y0), (x1, y1) = polygon.T, np.roll(polygon, -1, axis=0).T
        spans_y = (y0 > y) != (y1 > y)
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing_x = x0 + (y - y0) * (x1 - x0) / (y1 - y0)
        is_inside[near] = (spans_y & (crossing_x > x)).sum(axis=1) % 2 == 1
    return is_inside
