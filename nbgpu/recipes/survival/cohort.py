"""A generated cohort with known true hazards: volumes with lesions, where more lesions mean an earlier event.

A patient's volume shows the burden of lesions. All its intensities are shifted by a random offset, as those
of different scanners are, so that the overall brightness of a volume carries no information.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZE = (24, 24, 16)
"""In voxels."""
_TISSUE, _NOISE, _OFFSET, _LESION = 0.0, 40.0, 60.0, 500.0
"""In Hounsfield units: the mean of the tissue, the standard deviations of the voxels' noise and of the
volumes' offsets, and the additional brightness of lesions."""
_NUM_LESIONS = (1, 30)
"""The range; uniform in the logarithm, so that a patient with few lesions is as frequent as one with many."""
_RADII = (1.2, 2.2)
_HAZARD_PER_LOG_BURDEN = 1.2
_MEDIAN_BURDEN = 120.0
"""In voxels; a patient with this burden has the hazard that belongs to `_MEAN_TIME`."""
_MEAN_TIME, _MEAN_FOLLOW_UP = 1000.0, 1500.0
"""In days."""


@dataclass(frozen=True)
class Patient:
    """One generated patient."""

    image: Tensor
    """(1, 24, 24, 16) in Hounsfield units."""
    time: float
    """In days."""
    event: bool
    log_hazard: float
    """The true log hazard; no prediction can be better."""


def patient(seed: int, index: int) -> Patient:
    """Generate a patient of the cohort of a seed, the same on every call."""
    rng = np.random.default_rng([seed, index])
    lesions = _lesions(rng)
    log_hazard = _HAZARD_PER_LOG_BURDEN * log(lesions.sum() / _MEDIAN_BURDEN)
    image = rng.normal(_TISSUE + rng.normal(0, _OFFSET), _NOISE, SIZE) + _LESION * lesions
    until_event = rng.exponential(_MEAN_TIME * exp(-log_hazard))
    until_lost = rng.exponential(_MEAN_FOLLOW_UP)
    return Patient(
        torch.from_numpy(image.astype(np.float32))[None],
        min(until_event, until_lost),
        until_event <= until_lost,
        log_hazard,
    )


def _lesions(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the share of lesion in each voxel: some balls with soft edges."""
    axes = np.ogrid[tuple(slice(edge) for edge in SIZE)]
    found = np.zeros(SIZE)
    for _ in range(round(exp(rng.uniform(*np.log(_NUM_LESIONS))))):
        radius = rng.uniform(*_RADII)
        centre = [rng.uniform(radius, edge - 1 - radius) for edge in SIZE]
        distance = np.sqrt(sum((axis - at) ** 2 for axis, at in zip(axes, centre, strict=True)))
        found = np.maximum(found, np.clip(radius + 0.5 - distance, 0, 1))
    return found
