"""Contours of an image at a threshold and widths along a row, finer than a pixel.

Pixel i covers i to i + 1 pixels, and its value is that of its centre, at i + 1/2; between centres values are
taken to go straight. Lengths are in nm. Fields go on periodically. Edges in any direction are in edges.py.
"""

from __future__ import annotations

import numpy as np
import torch
from contourpy import contour_generator
from torch import Tensor


def contours(image: Tensor, threshold: float, pixel_nm: float) -> list[np.ndarray]:
    """Lines where the image (H, W) crosses the threshold: (N, 2) with x and y in nm each, closed but for
    those that leave the field."""
    generator = contour_generator(z=image.detach().cpu().double().numpy())
    lines = generator.lines(threshold)
    return [(np.asarray(line) + 0.5) * pixel_nm for line in lines]


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of what is above 1/2, of each sample: (N, ..., H, W) twice -> (N,). 1 where
    both are empty."""
    a, b = (printed.flatten(1) > 0.5 for printed in (first, second))
    union = (a | b).sum(dim=1)
    return torch.where(union > 0, (a & b).sum(dim=1) / union.clamp(min=1), 1.0)


def crossings(profile: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Where a periodic profile (N,) crosses the threshold, in pixels: (upwards, downwards), each rising and
    in 0..N."""
    after = np.roll(profile, -1)
    up, down = (profile <= threshold) & (after > threshold), (profile > threshold) & (after <= threshold)
    places = []
    for at in (up, down):
        index = np.flatnonzero(at)
        share = (threshold - profile[index]) / (after[index] - profile[index])
        places.append(np.sort((index + 0.5 + share) % len(profile)))
    return places[0], places[1]


def widths_nm(profile: np.ndarray, threshold: float, pixel_nm: float) -> np.ndarray:
    """The critical dimensions along a cut: the width of each stretch above the threshold, from left to right;
    (K,).

    A stretch that goes over the end is measured as one. Empty where nothing crosses.
    """
    up, down = crossings(profile, threshold)
    if not len(up):
        return np.empty(0)
    ends = down[np.searchsorted(down, up) % len(down)]
    return np.asarray((ends - up) % len(profile) * pixel_nm)
