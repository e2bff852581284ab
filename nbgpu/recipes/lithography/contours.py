"""Sub-pixel contours of an image at a threshold and line widths along a row.

Pixel i covers the interval i to i + 1, and its value belongs to its centre, at i + 1/2; values between
centres are interpolated linearly. Lengths are in nm. Fields are periodic. Edges in any direction are in
edges.py.
"""

from __future__ import annotations

import numpy as np
import torch
from contourpy import contour_generator
from torch import Tensor


def contours(image: Tensor, threshold: float, pixel_nm: float) -> list[np.ndarray]:
    """Return the lines along which the image (H, W) crosses the threshold.

    Each line is (N, 2), x and y in nm, and is closed unless it leaves the field.
    """
    # contourpy places the value of pixel i at i, and the centre of the pixel is at i + 1/2.
    generator = contour_generator(z=image.detach().cpu().double().numpy())
    lines = generator.lines(threshold)
    return [(np.asarray(line) + 0.5) * pixel_nm for line in lines]


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of the areas above 1/2, per sample: two (N, ..., H, W) -> (N,).

    It is 1 where both areas are empty.
    """
    a, b = (printed.flatten(1) > 0.5 for printed in (first, second))
    union = (a | b).sum(dim=1)
    return torch.where(union > 0, (a & b).sum(dim=1) / union.clamp(min=1), 1.0)


def crossings(profile: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions, in pixels, at which a periodic profile (N,) crosses the threshold.

    The result is (upward crossings, downward crossings), each in ascending order and within 0..N.
    """
    after = np.roll(profile, -1)
    up, down = (profile <= threshold) & (after > threshold), (profile > threshold) & (after <= threshold)
    places = []
    for at in (up, down):
        index = np.flatnonzero(at)
        share = (threshold - profile[index]) / (after[index] - profile[index])
        places.append(np.sort((index + 0.5 + share) % len(profile)))
    return places[0], places[1]


def widths_nm(profile: np.ndarray, threshold: float, pixel_nm: float) -> np.ndarray:
    """Return the critical dimensions along a cut: the width of each stretch above the threshold, from left
    to right, as (K,).

    A stretch that wraps around the end counts as one. The result is empty if nothing crosses the threshold.
    """
    up, down = crossings(profile, threshold)
    if not len(up):
        return np.empty(0)
    # The next falling edge after each rising one; after the last one comes the first of the next period.
    ends = down[np.searchsorted(down, up) % len(down)]
    return np.asarray((ends - up) % len(profile) * pixel_nm)
