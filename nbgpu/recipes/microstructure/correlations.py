"""Two- and three-point correlations: how probable it is that two or three pixels, a vector apart, are in a
phase."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nbgpu.recipes.microstructure.measure import Descriptor, Measure, soft_step


def two_point(first: Tensor, second: Tensor, measure: Measure) -> Tensor:
    """The mean of first(x + r) second(x) over x, for all r with components below limit_to.

    Args:
        first, second: (..., H, W).

    Returns:
        (..., 2 limit_to - 1, 2 limit_to - 1), r = 0 in the middle.

    By the Wiener-Khinchin theorem. Where the field is not periodic, the mean is over the pairs inside it.
    """
    height, width = first.shape[-2:]
    reach = measure.limit_to - 1
    rows, columns = (height, width) if measure.periodic else (height + reach, width + reach)
    spectrum = torch.fft.rfft2(first, s=(rows, columns))
    if second is first:
        product = (spectrum.real.square() + spectrum.imag.square()).to(spectrum.dtype)
    else:
        product = spectrum * torch.fft.rfft2(second, s=(rows, columns)).conj()
    sums: Tensor = torch.fft.irfft2(product, s=(rows, columns)).roll((reach, reach), (-2, -1))
    sums = sums[..., : 2 * reach + 1, : 2 * reach + 1]
    if measure.periodic:
        return sums / (height * width)
    lags = torch.arange(-reach, reach + 1, device=first.device).abs()
    return sums / ((height - lags)[:, None] * (width - lags))


def _fft_correlations(x: Tensor, measure: Measure) -> Tensor:
    """(N, 2L - 1, 2L - 1): the two-point correlation S2, r = 0 in the middle."""
    return two_point(x, x, measure)


def _pairs(first: Tensor, second: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Whether a pixel of `first` and the one of `second` a vector (i, j) further are both in the phase,
    nearly.

    Returns:
        (N, L * L, H', W') for 0 <= i, j < L, and (N, (L - 1) ** 2, H', W') for i, -j = 1 to L - 1, by i and
        then by |j|. H' and W' are those of the positions that count: all where the field is periodic, else
        those from which every vector ends inside.
    """
    reach = measure.limit_to - 1
    if measure.periodic:
        second = pad(second[:, None], (reach, reach, 0, reach), mode="circular")[:, 0]
    else:
        first = first[:, : first.shape[1] - reach, reach : first.shape[2] - reach]
    height, width = first.shape[-2:]
    windows = second.unfold(1, height, 1).unfold(2, width, 1)  # (N, L, 2L - 1, H', W'), no copy
    both = soft_step((first[:, None, None] + windows) / 2)
    return both[:, :, reach:].flatten(1, 2), both[:, 1:, :reach].flip(2).flatten(1, 2)


def _gram(features: Tensor) -> Tensor:
    """(N, C, C): the mean of the products of each two of (N, C, H, W)."""
    flat = features.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[2]


def _correlations(x: Tensor, measure: Measure) -> Tensor:
    """(N, C, C), C = L^2 + (L - 1)^2: S3 for each two vectors, S2 on the diagonal, with soft steps (see
    `soft_step`).

    Where the field is periodic, vectors with a negative second component begin 2L pixels further along the
    last axis, because the reference has it so and its values are to be met. S2 is none the worse for it;
    three-point values of such a vector with one of the others are those of two pairs 2L apart. Where it is
    not periodic all begin at one pixel.
    """
    forward, backward = _pairs(x, x, measure)
    if measure.periodic:
        backward = backward.roll(-2 * measure.limit_to, -1)
    return _gram(torch.cat([forward, backward], dim=1))


def _two_point_correlations(x: Tensor, measure: Measure) -> Tensor:
    """(N, L^2 + (L - 1)^2): S2 with soft steps, the diagonal of Correlations."""
    return torch.cat([part.square().mean(dim=(2, 3)) for part in _pairs(x, x, measure)], dim=1)


def _line_correlations(x: Tensor, measure: Measure) -> Tensor:
    """(N, 2L - 1, 2L - 1): as Correlations, for vectors along the axes only: (1..L - 1, 0), then (0, 0..L -
    1)."""
    limit = measure.limit_to
    forward, _ = _pairs(x, x, measure)
    vectors = [*range(limit, limit * limit, limit), *range(limit)]
    return _gram(forward[:, vectors])


def _fft_cross_correlations(x: Tensor, measure: Measure) -> Tensor:
    """(N, P (P - 1) / 2, 2L - 1, 2L - 1): S2 of the phases p > q: p at x + r, q at x, in the order of (p,
    q)."""
    pairs = sorted((p, q) for q, p in combinations(range(x.shape[1]), 2))
    return torch.stack([two_point(x[:, p], x[:, q], measure) for p, q in pairs], dim=1)


def _cross_correlations(x: Tensor, measure: Measure) -> Tensor:
    """(N, P (P - 1) / 2 * C, C), as Correlations for the phases p > q: p at x, q at x + r, one pair below the
    other.

    Every vector begins at the same pixel and every pixel counts, r = 0 is a pair like any other. The
    reference leaves out a row and a column, and has p alone at r = 0: its values differ.
    """
    pairs = sorted((p, q) for q, p in combinations(range(x.shape[1]), 2))
    grams = [_gram(torch.cat(_pairs(x[:, p], x[:, q], measure), dim=1)) for p, q in pairs]
    return torch.cat(grams, dim=1)


CORRELATIONS = (
    Descriptor("FFTCorrelations", _fft_correlations),
    Descriptor("Correlations", _correlations),
    Descriptor("TwoPointCorrelations", _two_point_correlations),
    Descriptor("LineCorrelations", _line_correlations),
    Descriptor("FFTCrossCorrelations", _fft_cross_correlations, of="phases"),
    Descriptor("CrossCorrelations", _cross_correlations, weight=10.0, of="phases"),
)
