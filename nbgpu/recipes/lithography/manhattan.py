"""Generated Manhattan masks: bars, lines and spaces, contacts and bends, with all edges along the axes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NARROWEST_NM = 50.0
WIDEST_NM = 150.0
"""Range of the widths of bars, and of lines and spaces in gratings."""


def manhattan(size: int, pixel_nm: float, seed: int, index: int) -> Tensor:
    """Return mask number `index` of the family `seed`; it is the same whatever was drawn before.

    A third of the masks are gratings with a gap cut out; the others have bars, bends and contacts, which may
    touch and form larger shapes. All edges are on pixel sides, and shapes wrap around the edges of the field.

    Returns a float32 tensor of shape (1, size, size): 1 is clear, 0 opaque.
    """
    rng = np.random.default_rng((seed, index))
    mask = np.zeros((size, size), dtype=np.float32)

    def pixels(low_nm: float, high_nm: float) -> int:
        return max(1, round(rng.uniform(low_nm, high_nm) / pixel_nm))

    def clear(top: int, left: int, height: int, width: int, value: float = 1.0) -> None:
        rows, columns = np.arange(top, top + height) % size, np.arange(left, left + width) % size
        mask[np.ix_(rows, columns)] = value

    if rng.random() < 1 / 3:
        line, space = pixels(NARROWEST_NM, WIDEST_NM), pixels(NARROWEST_NM, WIDEST_NM)
        for start in range(0, size - line - space + 1, line + space):
            clear(start, 0, line, size)
        top, left = (int(n) for n in rng.integers(size, size=2))
        clear(top, left, pixels(200, 600), pixels(100, 300), value=0.0)
    else:
        for _ in range(rng.integers(8, 18)):
            top, left = (int(n) for n in rng.integers(size, size=2))
            width, length = pixels(NARROWEST_NM, WIDEST_NM), pixels(200, 800)
            kind = rng.choice(["bar", "bend", "contact"])
            clear(top, left, width, width if kind == "contact" else length)
            if kind == "bend":
                clear(top, left, pixels(200, 800), width)
    if rng.random() < 0.5:
        mask = mask.T
    return torch.from_numpy(np.ascontiguousarray(mask))[None]
