"""Resist, contours and what is measured on them, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nbgpu.recipes.lithography.contours import contours, iou, widths_nm
from nbgpu.recipes.lithography.edges import pixel_sites, placement_errors_nm
from nbgpu.recipes.lithography.manhattan import manhattan
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.resist import Resist, blurred
from nbgpu.recipes.lithography.sources import Source
from nbgpu.recipes.lithography.window import conditions, process_window


def test_widths_of_a_cosine_are_found_far_below_a_pixel() -> None:
    """cos(2 pi x / period) is above c for period * arccos(c) / pi."""
    period, pixel_nm = 40, 5.0
    x = np.arange(160) + 0.5
    for phase in (0.0, 3.3, 20.0):  # in the last one a stretch goes over the end
        profile = np.cos(2 * np.pi * (x - phase) / period)
        found = widths_nm(profile, 0.2, pixel_nm)
        assert len(found) == 4
        np.testing.assert_allclose(found, period * math.acos(0.2) / math.pi * pixel_nm, atol=0.1)
    assert len(widths_nm(np.ones(8), 0.5, 1.0)) == 0


def test_diffusion_damps_each_frequency_as_a_gaussian_does() -> None:
    x = torch.arange(64, dtype=torch.float64)
    wave = 0.5 + 0.5 * torch.cos(2 * math.pi * 4 * x / 64).expand(32, -1)
    resist = Resist(threshold=0.5, diffusion_nm=20.0, steepness=30.0)
    latent = resist.latent(wave, pixel_nm=10.0, dose=1.2)
    damped = math.exp(-2 * (math.pi * 2 * 4 / 64) ** 2)
    torch.testing.assert_close(latent, 1.2 * (0.5 + (wave - 0.5) * damped), rtol=0, atol=1e-13)
    smooth, hard = resist.printed(wave, 10.0), Resist(0.5, 20.0).printed(wave, 10.0)
    assert torch.equal((smooth > 0.5).double(), hard)
    image = wave.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda value: resist.printed(value, 10.0), image, fast_mode=True)


def test_a_disc_has_one_contour_with_its_radius() -> None:
    centres = torch.arange(64, dtype=torch.float64) + 0.5
    away = torch.hypot(centres[:, None] - 30, centres[None, :] - 34)
    (line,) = contours(-away, -12.0, pixel_nm=2.0)
    radii = np.hypot(line[:, 0] - 34 * 2.0, line[:, 1] - 30 * 2.0)
    np.testing.assert_allclose(radii, 24.0, atol=0.05)


def test_edge_placement_errors_are_signed_distances_to_the_design() -> None:
    design = torch.zeros(64, 64)
    design[20:44, 16:48] = 1
    grown = blurred(torch.nn.functional.interpolate(design[None, None], size=(64, 64))[0, 0].double(), 1.5)
    sites = pixel_sites(design, 10.0, corner_nm=60.0)
    exact = placement_errors_nm(grown, 0.5, sites, 10.0)
    assert len(exact) == 2 * (24 - 12) + 2 * (32 - 12)
    assert np.abs(exact).max() < 0.05
    low, high = (placement_errors_nm(grown, t, sites, 10.0) for t in (0.3, 0.7))
    assert (low > 5).all()
    np.testing.assert_allclose(low, -high, rtol=0, atol=0.01)
    lost = placement_errors_nm(torch.zeros(64, 64), 0.5, pixel_sites(design, 10.0), 10.0)
    assert len(lost) == 2 * (24 + 32)
    assert np.isnan(lost).all()


def test_iou_counts_each_sample_and_two_empty_ones_agree() -> None:
    first = torch.zeros(3, 1, 4, 4)
    second = first.clone()
    first[0, 0, :2] = 1
    second[0, 0, 1:3] = 1
    first[2] = second[2] = 1
    assert iou(first, second).tolist() == pytest.approx([1 / 3, 1, 1])


def test_the_process_window_of_lines_and_its_parts() -> None:
    """More dose prints wider lines, focus both ways is the same, and ranks' parts are those of the whole."""
    mask = torch.zeros(48, 48, dtype=torch.float64)
    mask[:, torch.arange(48) % 16 < 8] = 1
    optics, source = Optics(na=0.85), Source(num_cells=7)
    asked = conditions([0.8, 1.0, 1.2], [-120.0, 0.0, 120.0])
    whole = process_window(mask, mask, optics, source, Resist(), 20.0, asked)
    parts = [process_window(mask, mask, optics, source, Resist(), 20.0, asked[rank::2]) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1], key=repr) == sorted(whole, key=repr)
    cds = {(c.defocus_nm, c.dose): c.cd_nm for c in whole}
    assert cds[0.0, 0.8] < cds[0.0, 1.0] < cds[0.0, 1.2]
    assert cds[-120.0, 1.0] == pytest.approx(cds[120.0, 1.0], abs=1e-6)
    assert abs(cds[120.0, 1.0] - cds[0.0, 1.0]) > 0.5
    assert all(c.num_lost == 0 and 0.5 < c.iou <= 1 for c in whole)


def test_generated_masks_are_always_the_same_and_differ() -> None:
    masks = [manhattan(64, 25.0, seed=1, index=i) for i in range(8)]
    assert torch.equal(masks[3], manhattan(64, 25.0, seed=1, index=3))
    assert not torch.equal(masks[3], manhattan(64, 25.0, seed=2, index=3))
    assert all(set(mask.unique().tolist()) == {0.0, 1.0} and mask.shape == (1, 64, 64) for mask in masks)
    assert len({mask.numpy().tobytes() for mask in masks}) == 8
