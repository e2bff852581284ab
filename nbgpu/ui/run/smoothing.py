"""The smoothed line of a noisy curve, which does not lag behind it.

At each point a straight line is fitted to the points around it, whose weights fall exponentially to both
sides (local linear regression). In the middle that is a centred mean. A moving average of the past alone,
which is common in other tools, shows a falling loss later and higher than it is. At the end, where there is
no future yet, a centred mean would lag, too, and the fitted line does not, as long as the trend is a straight
one. The price is that the last few points of the line may move while new ones arrive.

`widgets/src/series.ts` does the same for the live panel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SPAN = 15
"""About how many points on either side count."""

_REACH_IN_SPANS = 9
"""Points that are further away weigh less than a millionth."""


def smoothed(values: Sequence[float], span: int = SPAN) -> list[float]:
    """Return the smoothed values. NaN and infinity are skipped, and get the value of the line there."""
    if not values:
        return []
    reach = _REACH_IN_SPANS * span
    distances = np.arange(-reach, reach + 1)
    weights = (1 - 2 / (span + 1)) ** np.abs(distances)

    def around(of: NDArray[np.float64], power: int) -> NDArray[np.float64]:
        """Return for each point the sum of weight x distance^power x `of` over the points around it."""
        # A convolution runs through its kernel backwards.
        return np.convolve(of, (weights * distances**power)[::-1])[reach : reach + len(of)]

    given = np.asarray(values, np.float64)
    counts = np.isfinite(given).astype(np.float64)
    known = np.where(counts > 0, given, 0.0)
    s0, s1, s2 = around(counts, 0), around(counts, 1), around(counts, 2)
    t0, t1 = around(known, 0), around(known, 1)
    spread = s0 * s2 - s1 * s1
    with np.errstate(divide="ignore", invalid="ignore"):
        # Too few points, or all of them at one place, define no slope.
        line = np.where(spread > 1e-9 * s0 * s0, (s2 * t0 - s1 * t1) / spread, t0 / s0)
    return [float(value) for value in line]
