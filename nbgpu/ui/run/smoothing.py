"""Smooth a noisy curve without a lag, by local linear regression.

At each point a straight line is fitted to the points around it, with weights that fall exponentially to both
sides. In the middle of the curve that is a centred mean. A moving average of the past alone, which is common
in other tools, would show a falling loss too high. At the end of the curve, where there is no future yet, a
centred mean would lag as well, and the fitted line follows a straight trend. The price is that the last few
points of the smoothed curve may move while new points arrive.

`widgets/src/series.ts` does the same for the live panel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SPAN = 15
"""The number of points on either side that have most of the weight."""

_REACH = 9 * SPAN
"""Points at a greater distance have less than a millionth of the weight, and are left out."""


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the smoothed values. A NaN or an infinity has no weight, and its place gets the value of the
    fitted line."""
    if not values:
        return []
    distances = np.arange(-_REACH, _REACH + 1)
    weights = (1 - 2 / (SPAN + 1)) ** np.abs(distances)

    def weighted_sums(terms: NDArray[np.float64], power: int) -> NDArray[np.float64]:
        """For each point, the sum of weight x distance^power x term over the points around it."""
        # A convolution reverses its kernel.
        return np.convolve(terms, (weights * distances**power)[::-1])[_REACH : _REACH + len(terms)]

    y = np.asarray(values, np.float64)
    is_finite = np.isfinite(y).astype(np.float64)
    y = np.where(is_finite > 0, y, 0.0)
    # The intercept of a weighted least-squares line, with the distance as x (the normal equations).
    w, wx, wxx = (weighted_sums(is_finite, power) for power in (0, 1, 2))
    wy, wxy = weighted_sums(y, 0), weighted_sums(y, 1)
    determinant = w * wxx - wx * wx
    with np.errstate(divide="ignore", invalid="ignore"):
        # One point alone defines no slope; its value is the weighted mean.
        line = np.where(determinant > 1e-9 * w * w, (wxx * wy - wx * wxy) / determinant, wy / w)
    return [float(value) for value in line]
