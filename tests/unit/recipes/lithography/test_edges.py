"""Edges in any direction: what prints there, against closed forms."""

from __future__ import annotations

import io
import math

import gdstk
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nbgpu.recipes.lithography.edges import (
    Cut,
    Sites,
    contest_sites,
    pixel_sites,
    placement_errors_nm,
    polygon_sites,
    stretches_nm,
)
from nbgpu.recipes.lithography.imaging import abbe
from nbgpu.recipes.lithography.overlay import overlay
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.rasterise import Polygon, rasterised
from nbgpu.recipes.lithography.resist import blurred
from nbgpu.recipes.lithography.sources import Source

NUM_PIXELS, PIXEL_NM = 64, 20.0
FIELD_NM = NUM_PIXELS * PIXEL_NM


def _grating(waves: tuple[int, int]) -> tuple[list[Polygon], Tensor, np.ndarray, float]:
    """Lines as wide as the spaces, so many waves along x and y of the field: (lines, aerial image, across,
    amplitude).

    Only the orders -1, 0 and 1 pass the lens, and light comes along the axis: the image is (1/2 + 2 amplitude
    cos)^2.
    """
    frequency = np.array(waves) / FIELD_NM
    period = 1 / np.hypot(*frequency)
    across = frequency * period
    along = np.array([-across[1], across[0]])
    quarter, far = across * period / 4, along * 3 * FIELD_NM
    lines = []
    for number in range(-sum(waves), 2 * sum(waves)):
        middle = across * period * (number + 0.5)
        lines.append(
            np.array([middle + a * quarter + b * far for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))])
        )
    mask = torch.from_numpy(rasterised(lines, (0, 0), (NUM_PIXELS, NUM_PIXELS), PIXEL_NM)).double()
    aerial = abbe(Optics(na=0.85), Source("point").points(), (NUM_PIXELS, NUM_PIXELS), PIXEL_NM)(mask)
    if 0 in waves:
        # Edges lie on pixel sides, and the sum over the pixels of a line is a geometric one.
        turn = math.pi * sum(waves) / NUM_PIXELS
        return lines, aerial, across, sum(waves) / NUM_PIXELS / math.sin(turn)
    # A pixel has the mean of its area.
    return lines, aerial, across, float(np.sinc(np.array(waves) / NUM_PIXELS).prod()) / math.pi


@pytest.mark.parametrize("waves", [(4, 0), (0, 4), (3, 4), (1, 5)])
def test_edges_and_widths_of_a_grating_are_those_of_its_cosine(waves: tuple[int, int]) -> None:
    """The amplitude is above the root of the threshold for period * arccos((root - 1/2) / (2 amplitude)) /
    pi."""
    lines, aerial, across, amplitude = _grating(waves)
    period = FIELD_NM / math.hypot(*waves)
    for threshold in (0.2, 0.3, 0.45):
        width = period / math.pi * math.acos((math.sqrt(threshold) - 0.5) / (2 * amplitude))
        sites = polygon_sites(lines, PIXEL_NM, field_nm=(FIELD_NM, FIELD_NM))
        assert len(sites) > 400
        errors = placement_errors_nm(aerial, threshold, sites, PIXEL_NM)
        np.testing.assert_allclose(errors, (width - period / 2) / 2, atol=0.1)
        start = np.array([900.0, 100.0])
        cut = Cut((900.0, 100.0), tuple(start + 700 * across))
        stretches = stretches_nm(aerial, threshold, cut, PIXEL_NM)
        assert len(stretches) >= 1
        np.testing.assert_allclose(stretches[:, 1] - stretches[:, 0], width, atol=0.2)
        np.testing.assert_allclose(np.diff(stretches[:, 0]), period, atol=0.2)


def test_a_circle_that_prints_too_large_is_so_along_each_normal() -> None:
    centres = (torch.arange(NUM_PIXELS, dtype=torch.float64) + 0.5) * PIXEL_NM
    away = torch.hypot(centres[:, None] - 600, centres[None, :] - 650)
    circle = np.asarray(gdstk.ellipse((650, 600), 300, tolerance=0.01).points)
    sites = polygon_sites([circle], PIXEL_NM)
    np.testing.assert_allclose(sites.normals, (sites.points_nm - (650, 600)) / 300, atol=0.06)
    np.testing.assert_allclose(placement_errors_nm(-away, -309.0, sites, PIXEL_NM), 9.0, atol=0.1)
    assert np.isnan(placement_errors_nm(-away, -309.0, sites, PIXEL_NM, reach_nm=8.0)).all()
    pixels = (away < 300).double()
    coarse = placement_errors_nm(-away, -309.0, pixel_sites(pixels, PIXEL_NM), PIXEL_NM)
    assert abs(float(np.nanmean(coarse)) - 9) < PIXEL_NM


@pytest.mark.parametrize("pixel_nm", [25.0, 7.3])
def test_sites_on_sides_between_pixels_give_what_sites_beside_them_give(pixel_nm: float) -> None:
    """The former are evaluated together, and the latter, a millionth of a nanometre away, one by one."""
    coarse = torch.rand(12, 20, generator=torch.Generator().manual_seed(0)) > 0.5
    design = coarse.double().repeat_interleave(4, 0).repeat_interleave(4, 1)
    image = blurred(design[None, None], 1.7)[0, 0]
    for sites in (pixel_sites(design, pixel_nm), contest_sites(design, pixel_nm)):
        beside = Sites(sites.points_nm + 1e-6, sites.normals)
        together, one_by_one = (
            placement_errors_nm(image, 0.5, some, pixel_nm, reach_nm=40.0) for some in (sites, beside)
        )
        assert {*map(tuple, sites.normals)} == {(1, 0), (-1, 0), (0, 1), (0, -1)}
        assert np.isfinite(together).sum() > 100
        np.testing.assert_allclose(together, one_by_one, atol=1e-5)


def test_only_the_outline_of_polygons_that_touch_and_overlap_has_sites() -> None:
    def box(x: float, y: float, width: float, height: float) -> Polygon:
        return np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])

    boxes = [box(0, 0, 100, 100), box(100, 0, 100, 100)[::-1], box(50, 50, 100, 50), box(0, 0, 100, 100)]
    sites = polygon_sites(boxes, 10.0)
    assert len(sites) == 20 + 20 + 10 + 10
    outside = sites.points_nm + sites.normals
    assert ((outside < 0) | (outside > (200, 100))).any(axis=1).all()
    assert len(polygon_sites(boxes[:1], 10.0, corner_nm=20.0)) == 4 * 6
    assert len(polygon_sites(boxes, 10.0, field_nm=(100.0, 100.0))) == 10 + 10


def test_coverage_by_slanted_polygons_is_exact() -> None:
    rng = np.random.default_rng(0)
    polygons = [
        np.asarray(gdstk.ellipse(rng.uniform(10, 60, 2), rng.uniform(4, 15), 3, tolerance=0.05).points)
        for _ in range(6)
    ]
    polygons.append(np.array([[-10, 5], [80, 22], [80, 31], [-10, 14.0]]))
    found = rasterised(polygons, (0, 0), (16, 20), 4.0)
    for row, column in ((2, 3), (4, 0), (5, 19), (9, 9), (15, 8)):
        pixel = gdstk.rectangle((column * 4, row * 4), (column * 4 + 4, row * 4 + 4))
        whole = gdstk.boolean([gdstk.Polygon(p) for p in polygons], [], "or", precision=1e-4)
        area = sum(part.area() for part in gdstk.boolean(whole, pixel, "and", precision=1e-4))
        assert found[row, column] == pytest.approx(area / 16, abs=5e-4)
    assert 0 < found.mean() < 1


def test_an_overlay_says_and_shows_what_prints() -> None:
    lines, aerial, _, _ = _grating((4, 0))
    row = Cut((0.0, 500.0), (FIELD_NM, 500.0))
    shown = overlay(lines, aerial, 0.3, PIXEL_NM, cuts=[row])
    assert shown.table["num_lost"] == 0
    assert shown.table["mean_size_nm"] == pytest.approx(-shown.table["mean_nm"])
    (widths,) = shown.widths_nm
    # Half of the error is at either side.
    np.testing.assert_allclose(widths, FIELD_NM / 8 + 2 * shown.table["mean_nm"], atol=0.1)
    assert len(shown.contours_nm) == 8
    picture = Image.open(io.BytesIO(shown._repr_png_()))
    assert len(picture.convert("RGB").getcolors(2**20) or []) > 20
    pixels = overlay((aerial > 0.6).double(), torch.zeros_like(aerial), 0.3, PIXEL_NM)
    assert pixels.table["num_lost"] == pixels.table["num_sites"] == 8 * NUM_PIXELS
    assert math.isnan(pixels.table["worst_nm"])
