"""The measures of a made modality: over a mask, and in its frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from nbgpu.recipes.diffusion.measures import masked_psnr_db, masked_ssim, quality, spectrum_distance_db
from nbgpu.recipes.diffusion.phantoms import phantom


def test_what_lies_outside_the_mask_does_not_count() -> None:
    rng = np.random.default_rng(0)
    target, output = (torch.from_numpy(rng.random((1, 1, 16, 16, 16))) * 2 - 1 for _ in range(2))
    brain = torch.zeros(1, 1, 16, 16, 16)
    brain[..., 3:12, 2:13, 4:14] = 1
    label = torch.zeros(1, 1, 16, 16, 16, dtype=torch.long)
    label[..., 5:9, 5:9, 6:10] = 2
    (row,) = quality(output, target, brain, label)
    assert list(row) == ["psnr_db", "ssim", "spectrum_db", "tumour_psnr_db", "tumour_ssim"]
    elsewhere = torch.where(brain > 0, output, torch.full_like(output, 0.7))
    assert quality(elsewhere, target, brain, label) == [row]
    elsewhere = torch.where(label > 0, output, torch.full_like(output, 0.7))
    (other,) = quality(elsewhere, target, brain, label)
    assert (other["tumour_psnr_db"], other["tumour_ssim"]) == (row["tumour_psnr_db"], row["tumour_ssim"])
    assert other["psnr_db"] != row["psnr_db"]
    (same,) = quality(target, target, brain, label)
    assert same == {
        "psnr_db": 100,
        "ssim": 1,
        "spectrum_db": 0,
        "tumour_psnr_db": 100,
        "tumour_ssim": 1,
    }
    assert "tumour_ssim" not in quality(output, target, brain, torch.zeros_like(label))[0]


def test_the_squared_error_is_over_the_mask() -> None:
    target, output = torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 4, 4)
    output[0, 0, 0, 0] = 0.1
    mask = torch.zeros(1, 4, 4, 4, dtype=torch.bool)
    mask[0, 0, 0] = True
    # One voxel of four is off by a tenth.
    assert float(masked_psnr_db(output, target, mask)) == pytest.approx(-10 * math.log10(0.01 / 4), abs=1e-4)


def test_ssim_is_the_mean_in_the_mask_of_wangs_formula_with_nothing_outside() -> None:
    rng = np.random.default_rng(1)
    target = gaussian_filter(rng.random((24, 24, 24)), 1)
    output = target + rng.normal(0, 0.05, target.shape)
    mask = np.linalg.norm(np.indices(target.shape) - 11.5, axis=0) < 6
    x, y = output * mask, target * mask

    def blurred(image: np.ndarray) -> np.ndarray:
        return np.asarray(gaussian_filter(image, 1.5, radius=5, mode="constant"))

    mean_x, mean_y = blurred(x), blurred(y)
    variances = blurred(x * x) - mean_x**2 + blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    of_voxels = (2 * mean_x * mean_y + 0.01**2) * (2 * covariance + 0.03**2)
    of_voxels /= (mean_x**2 + mean_y**2 + 0.01**2) * (variances + 0.03**2)
    made, true, inside = (torch.from_numpy(array)[None] for array in (output, target, mask))
    assert masked_ssim(made, true, inside) == pytest.approx(float(of_voxels[mask].mean()), abs=1e-6)


def test_the_spectrum_tells_a_smooth_image_from_a_sharp_one_and_ignores_where_things_are() -> None:
    image = torch.rand(1, 16, 16, 16, dtype=torch.float64)
    assert spectrum_distance_db(image.roll(3, dims=1), image) == pytest.approx(0, abs=1e-9)
    # Half of every amplitude is 20 log10(2) dB at each frequency.
    assert spectrum_distance_db(0.5 * image, image) == pytest.approx(20 * math.log10(2))
    blurred = [
        torch.from_numpy(gaussian_filter(image.numpy(), (0, s, s, s), mode="wrap")) for s in (0.4, 0.8)
    ]
    slightly, much = (spectrum_distance_db(one, image) for one in blurred)
    assert 0.5 < slightly < much


def test_a_phantom_says_where_its_brain_is() -> None:
    head = phantom(16, 0, 3)
    assert set(head["brain"].unique().tolist()) == {0, 1}
    assert 0.1 < float(head["brain"].mean()) < 0.8
    assert bool((head["brain"][head["label"] > 0] == 1).all())
    assert float(head["t2f"][head["brain"] == 0].mean()) < -0.8
