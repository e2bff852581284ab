"""The smoothed line of a noisy curve, which does not lag behind it.

At each point a straight line is fitted to the points around it, whose weights fall exponentially to both
sides (local linear regression). In the middle that is a centred mean. A moving average of the past alone,
which is common in other tools, shows a falling loss later and higher than it is. At the end, where there is
no future yet, a centred mean would lag, too, and the fitted line does not, as long as the trend is a straight
one. The price is that the last few points of the line may move while new ones arrive.

`widgets/src/series.ts` does the same for the live panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

SPAN = 15
"""About how many points on either side count."""


def smoothed(values: Sequence[float], span: int = SPAN) -> list[float]:
    """Return the smoothed values. NaN and infinity are skipped, and get the value of the line there."""
    if not any(map(math.isfinite, values)):
        return [math.nan] * len(values)
    keep = 1 - 2 / (span + 1)
    past = list(_sums(values, keep))
    future = list(_sums(values[::-1], keep))[::-1]
    out = []
    for i, (w0, w1, w2, y0, y1) in enumerate(past):
        # The point itself is in both, and counts once. Distances into the past are negative.
        own = (1.0, values[i]) if math.isfinite(values[i]) else (0.0, 0.0)
        f0, f1, f2, g0, g1 = future[i]
        s0, s1, s2 = w0 + f0 - own[0], f1 - w1, w2 + f2
        t0, t1 = y0 + g0 - own[1], g1 - y1
        spread = s0 * s2 - s1 * s1
        # Too few points, or all of them at one place, define no slope.
        out.append((s2 * t0 - s1 * t1) / spread if spread > 1e-9 * s0 * s0 else t0 / s0)
    return out


def _sums(values: Sequence[float], keep: float) -> Iterable[tuple[float, float, float, float, float]]:
    """Yield for each point the sums over it and all before it, with the weight keep^distance: of 1, of the
    distance, of its square, of the value, and of distance x value."""
    w0 = w1 = w2 = y0 = y1 = 0.0
    for value in values:
        w0, w1, w2 = keep * w0, keep * (w1 + w0), keep * (w2 + 2 * w1 + w0)
        y0, y1 = keep * y0, keep * (y1 + y0)
        if math.isfinite(value):
            w0 += 1
            y0 += value
        yield w0, w1, w2, y0, y1
