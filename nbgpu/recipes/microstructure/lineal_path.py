"""The lineal path function: how probable it is that a whole straight line lies in a phase (Lu & Torquato 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from nbgpu.recipes.microstructure.measure import Descriptor, Measure, soft_step

_TIE = 0.1
"""A line that passes two pixels' border so closely counts half of each."""


def _slanted(half: int, rise: int) -> Tensor:
    """(2 half + 1,) * 2: the pixels of a line through the middle that goes `rise` columns in `half` rows, without its last one."""
    line = torch.zeros(2 * half + 1, 2 * half + 1, dtype=torch.float64)
    column = float(half - rise)
    for row in range(2 * half):
        line[row, round(column - _TIE)] += 0.5
        line[row, round(column + _TIE)] += 0.5
        # Added up as in the reference: the rounding decides which pixel a line takes that passes just at the border.
        column += rise / half
    return line


def _lines_of_length(half: int) -> Iterator[Tensor]:
    """Every line over 2 half + 1 pixels: the diagonals, the axes, and those between."""
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
def _lines(limit_to: int) -> Tensor:
    """(C, 2L + 1, 2L + 1): the lines over 1, 3, ... 2L + 1 pixels; a pixel counts 1, or 0.5 where two share it."""
    size = 2 * limit_to + 1
    lines = torch.zeros(1, size, size, dtype=torch.float64)
    lines[0, 0, 0] = 1
    padded = [
        pad(line, (0, size - len(line), 0, size - len(line)))
        for half in range(1, limit_to + 1)
        for line in _lines_of_length(half)
    ]
    return torch.cat([lines, torch.stack(padded)])


def _shares(x: Tensor, lines: Tensor, periodic: bool) -> Tensor:
    """(N, C, H', W'): the share of each line (C, h, w) that is in the phase, wherever it begins."""
    height, width = lines.shape[1:]
    x = x[:, None]
    if periodic:
        # Where a line is longer than the field, it does not begin everywhere: as in the reference.
        below, right = min(height, x.shape[2]) - 1, min(width, x.shape[3]) - 1
        x = pad(x, (0, right, 0, below), mode="circular")
    else:
        # Where the longest line is longer than the field, what is beyond is in no phase.
        x = pad(x, (0, max(0, width - x.shape[3]), 0, max(0, height - x.shape[2])))
    return conv2d(x, lines[:, None].to(x))


def _lineal_path_approximation(x: Tensor, measure: Measure) -> Tensor:
    """(N, C): the lineal path function with soft steps, for lines over 1, 3, ... 2L + 1 pixels in all directions.

    As in the reference, the share is of 1, 3, ... pixels also for slanted lines, which have one less, and is rounded to float32.
    """
    lines = _lines(measure.limit_to)
    num_pixels = lines.sum(dim=(1, 2), keepdim=True)
    num_pixels = num_pixels + (1 - num_pixels % 2)
    return soft_step(_shares(x, (lines / num_pixels).float().double(), measure.periodic)).mean(dim=(2, 3))


def _lineal_path(x: Tensor, measure: Measure) -> Tensor:
    """(N, C): the share of the positions at which the whole line is in the phase; where the field is between two, none is.

    The reference computes this and then overwrites it with the approximation; here it is what the name says.
    """
    lines = _lines(measure.limit_to)
    whole = _shares(x, lines / lines.sum(dim=(1, 2), keepdim=True), measure.periodic) > 0.99
    return whole.double().mean(dim=(2, 3))


def _line_lineal_path_approximation(x: Tensor, measure: Measure) -> Tensor:
    """(N, 2L - 1): as the approximation, along the axes only: down for 3, 5, ... 2L - 1 pixels, then across for 1, 3, ..."""
    lengths = range(3, 2 * measure.limit_to, 2)
    lines = torch.zeros(len(lengths) + 1, 2 * measure.limit_to - 1, dtype=torch.float64)
    lines[0, 0] = 1
    for index, length in enumerate(lengths, start=1):
        lines[index, :length] = 1 / length
    lines = lines.float().double()
    down = soft_step(_shares(x, lines[1:, :, None], measure.periodic)).mean(dim=(2, 3))
    across = soft_step(_shares(x, lines[:, None, :], measure.periodic)).mean(dim=(2, 3))
    return torch.cat([down, across], dim=1)


LINEAL_PATHS = (
    Descriptor("LinealPath", _lineal_path, differentiable=False),
    Descriptor("LinealPathApproximation", _lineal_path_approximation),
    Descriptor("LineLinealPathApproximation", _line_lineal_path_approximation),
)
