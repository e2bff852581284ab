"""Contours of an image at a threshold, and what is measured on them, finer than a pixel.

Pixel i covers i to i + 1 pixels, and its value is that of its centre, at i + 1/2; between centres values are taken to go
straight. Lengths are in nm. Fields go on periodically.
"""

from __future__ import annotations

import numpy as np
import torch
from contourpy import contour_generator
from torch import Tensor


def contours(image: Tensor, threshold: float, pixel_nm: float) -> list[np.ndarray]:
    """Lines where the image (H, W) crosses the threshold: (N, 2) with x and y in nm each, closed but for those that leave
    the field."""
    generator = contour_generator(z=image.detach().cpu().double().numpy())
    lines = generator.lines(threshold)
    return [(np.asarray(line) + 0.5) * pixel_nm for line in lines]


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of what is above 1/2, of each sample: (N, ..., H, W) twice -> (N,). 1 where both are empty."""
    a, b = (printed.flatten(1) > 0.5 for printed in (first, second))
    union = (a | b).sum(dim=1)
    return torch.where(union > 0, (a & b).sum(dim=1) / union.clamp(min=1), 1.0)


def crossings(profile: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Where a periodic profile (N,) crosses the threshold, in pixels: (upwards, downwards), each rising and in 0..N."""
    after = np.roll(profile, -1)
    up, down = (profile <= threshold) & (after > threshold), (profile > threshold) & (after <= threshold)
    places = []
    for at in (up, down):
        index = np.flatnonzero(at)
        share = (threshold - profile[index]) / (after[index] - profile[index])
        places.append(np.sort((index + 0.5 + share) % len(profile)))
    return places[0], places[1]


def widths_nm(profile: np.ndarray, threshold: float, pixel_nm: float) -> np.ndarray:
    """The critical dimensions along a cut: the width of each stretch above the threshold, from left to right; (K,).

    A stretch that goes over the end is measured as one. Empty where nothing crosses.
    """
    up, down = crossings(profile, threshold)
    if not len(up):
        return np.empty(0)
    ends = down[np.searchsorted(down, up) % len(down)]
    return np.asarray((ends - up) % len(profile) * pixel_nm)


def edge_placement_errors_nm(
    image: Tensor,
    threshold: float,
    design: Tensor,
    pixel_nm: float,
    reach_nm: float = 100.0,
    corner_nm: float = 0.0,
) -> Tensor:
    """How far the contour is outside each edge of a design, in nm, negative inside; NaN where none is within reach; (K,).

    Sites are pixel sides between a pixel of the design that is at least 1/2 and one that is not, for all rows and then all
    columns. Each is compared with the nearest crossing of the same direction on the line through its middle, across the
    edge.

    Args:
        image: (H, W), such as the latent image.
        threshold: where it prints.
        design: what was asked for, (H, W), 0 to 1. Where it is not pixels but areas, edges are those of the pixels.
        pixel_nm: of both.
        reach_nm: how far a contour is looked for.
        corner_nm: sites nearer than this to an end of their edge are left out.
    """
    values, wanted = image.detach().cpu().double().numpy(), design.cpu().numpy() >= 0.5
    errors: list[float] = []
    for axis in (1, 0):
        profiles, edges = np.moveaxis(values, axis, 1), np.moveaxis(wanted, axis, 1)
        rises = ~edges & np.roll(edges, -1, axis=1)
        falls = edges & ~np.roll(edges, -1, axis=1)
        margin = round(corner_nm / pixel_nm)
        kept = [_straight(ends, margin) for ends in (rises, falls)]
        for row in np.flatnonzero((kept[0] | kept[1]).any(axis=1)):
            for places, ends, outward in zip(crossings(profiles[row], threshold), kept, (-1, 1), strict=True):
                errors += [
                    outward * _nearest(places, at + 1.0, len(profiles[row])) * pixel_nm
                    for at in np.flatnonzero(ends[row])
                ]
    found = torch.tensor(errors, dtype=torch.float64)
    return torch.where(found.abs() <= reach_nm, found, torch.nan)


def _straight(ends: np.ndarray, margin: int) -> np.ndarray:
    """Sites whose edge goes on straight for `margin` more pixels on both sides."""
    kept = ends.copy()
    for step in range(1, margin + 1):
        kept &= np.roll(ends, step, axis=0) & np.roll(ends, -step, axis=0)
    return kept


def _nearest(places: np.ndarray, at: float, period: int) -> float:
    """The signed way from `at` to the nearest of the places on a circle; infinite where there is none."""
    if not len(places):
        return np.inf
    ways = (places - at + period / 2) % period - period / 2
    return float(ways[np.abs(ways).argmin()])
