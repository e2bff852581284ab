"""Baselines for the lithography network: a blur of the mask, SOCS (sum of coherent systems) with the true
lens and as many kernels as the network has, and resist models that an expert would fit to pairs by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.resist import blurred
from nbgpu.recipes.lithography.samples import build_optics, build_source, cached_imager

Terms = Callable[[Tensor], list[Tensor]]
"""Computes the terms of a linear model from aerial images; each term has the shape of the images."""


def best_blur(masks: Tensor, aerials: Tensor) -> float:
    """Return the standard deviation of the blur, in pixels, with which the squared blurred masks (N, 1, H, W)
    have the least mean squared error from their images."""
    sigmas = np.arange(0.5, 6.0, 0.1)
    errors = [float((blurred(masks, s).square() - aerials).square().mean()) for s in sigmas]
    return float(sigmas[int(np.argmin(errors))])


def num_systems(config: LithographyConfig) -> int:
    """Return the number of complex SOCS kernels with as many parameters as the network's real kernels: two
    real kernels make one complex kernel. There are at most as many as points of the source."""
    return min(config.num_kernels // 2, len(build_source(config).points()))


def socs_images(config: LithographyConfig, masks: Tensor) -> Tensor:
    """Return the aerial images (N, 1, H, H) of square masks by SOCS, with the lens of the settings and
    `num_systems` kernels."""
    edge = masks.shape[-1]
    imager = cached_imager(
        build_optics(config), build_source(config), edge, config.pixel, num_systems(config)
    )
    # In batches, to bound the memory.
    return torch.cat([imager(part) for part in torch.split(masks, config.batch_size)])


GAUSSIAN_RESIST, COMPACT_RESIST = "SOCS, best Gaussian resist", "SOCS, compact resist model"
_WIDTHS_NM = (12.5, 25.0, 50.0, 100.0, 200.0)
_POWERS = (1, 2, 3)
"""Terms of the compact model: each power of the image, blurred with each of these standard deviations."""
_NARROW_NM, _WIDE_NM = (25.0, 50.0), (100.0, 200.0, 300.0)
"""Terms of the compact model: products of a narrow and a wide blur, with these standard deviations."""


def fitted_resists(
    aerials: Tensor, images: Tensor, new: Tensor, pixel_nm: float, inner: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Fit models of a resist to pairs by least squares, and apply them to other aerial images.

    'Best Gaussian resist' is dose x blur + offset, all three fitted. 'Compact resist model' is a linear
    combination of terms, as the compact models of the industry are: the image, its square and its cube
    under five blurs each, its slope, and products of narrow and wide blurs, with which the response depends
    on the density nearby. Blurs are Gaussian, and the same along all directions.

    Args:
        aerials: aerial images of the masks to fit, (N, 1, H, W).
        images: the images in the resist that belong to them, of the same shape.
        new: aerial images that the models are applied to, (M, 1, H, W).
        pixel_nm: the width of a pixel.
        inner: leaves out the margins, which count in no fit.

    Returns:
        {name of the model: its images in the resist for `new`, (M, 1, H, W)}.
    """
    candidates: dict[str, list[Terms]] = {
        GAUSSIAN_RESIST: [partial(_one_blur, sigma=float(sigma)) for sigma in np.arange(0.1, 5.0, 0.2)],
        COMPACT_RESIST: [partial(_compact_terms, pixel_nm=pixel_nm)],
    }
    true = inner(images).double().flatten()
    predicted = {}
    for name, models in candidates.items():
        fits = [
            _least_squares([inner(term) for term in compute_terms(aerials)], true) for compute_terms in models
        ]
        best = int(np.argmin([error for _, error in fits]))
        weights, _ = fits[best]
        terms = torch.stack([torch.ones_like(new), *models[best](new)], dim=-1)
        predicted[name] = (terms.double() @ weights).to(new.dtype)
    return predicted


def num_compact_terms() -> int:
    """Return the number of weights of the compact model, that of the constant included."""
    return 1 + len(_compact_terms(torch.zeros(1, 1, 8, 8), 25.0))


def _one_blur(image: Tensor, sigma: float) -> list[Tensor]:
    return [blurred(image, sigma)]


def _compact_terms(image: Tensor, pixel_nm: float) -> list[Tensor]:
    """Return the terms of the compact resist model, each of the image's shape (N, 1, H, W): blurred powers of
    the image, products of narrow and wide blurs, and the slope of the image."""
    powers = [blurred(image**power, width / pixel_nm) for power in _POWERS for width in _WIDTHS_NM]
    narrow, wide = (
        [blurred(image, width / pixel_nm) for width in widths] for widths in (_NARROW_NM, _WIDE_NM)
    )
    # Central differences along x and y. The field is periodic, so roll continues it at its edges.
    slopes = [(narrow[0].roll(-1, axis) - narrow[0].roll(1, axis)).square() for axis in (-1, -2)]
    return [*powers, *(one * other for one in narrow for other in wide), (slopes[0] + slopes[1]).sqrt()]


def _least_squares(terms: list[Tensor], true: Tensor) -> tuple[Tensor, float]:
    """Fit a constant and the weights of T terms to values (N,) by least squares, in float64. Return the
    weights (1 + T,), the constant first, and the mean squared error."""
    matrix = torch.stack([torch.ones_like(true), *(term.double().flatten() for term in terms)], dim=1)
    weights = torch.linalg.lstsq(matrix, true[:, None]).solution[:, 0]
    return weights, float((matrix @ weights - true).square().mean())
