"""A generated cohort with known true hazards, which depend on the shape and the place of lesions in the
volumes.

Each volume has an organ with a few lesions of about the same size. A lesion is hollow or solid, and lies at
the organ's wall or deep inside. Its danger depends on both: a hollow lesion is the most dangerous kind at the
wall, and the least dangerous deep inside, where a solid lesion is worse. (The rule is made up.) The log
hazard of a patient follows from the mean danger of the lesions. So the number of lesions says almost nothing
about the hazard, and their mean shape and mean place say little: a model has to see each lesion together with
its place.

All intensities of a volume are shifted by a random offset, as those of different scanners are, so that the
overall brightness of a volume says nothing about the hazard either.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZE = (24, 24, 16)
"""In voxels."""
_OUTSIDE, _TISSUE, _NOISE, _OFFSET, _LESION = -120.0, 0.0, 40.0, 60.0, 500.0
"""In Hounsfield units: the means outside and inside the organ, the standard deviations of the voxels' noise
and of the volumes' offsets, and the additional brightness of lesions."""
_ORGAN = (11.0, 11.0, 7.4)
"""The largest semi-axes of the organ, in voxels; a volume's are 0.9 to 1 of them."""
_NUM_LESIONS = (2, 6)
"""The smallest and the largest number of lesions; the number is independent of the hazard."""
_APART = 5.2
"""The smallest distance between the centres of two lesions in voxels, if there is room for it."""
_NUM_TRIES = 40
"""The number of places that are drawn for a lesion before it may lie too near to another one."""


class _Kind(NamedTuple):
    """A kind of lesion."""

    depths: tuple[float, float]
    """The range of the distance from the organ's centre: 0 at the centre and 1 at the wall."""
    radius: float
    """In voxels."""
    hollow: float
    """The radius of the empty space inside, in voxels; 0 for a solid lesion."""
    danger: float


_AT_THE_WALL, _DEEP = (0.72, 0.78), (0.0, 0.45)
_HOLLOW, _SOLID = (2.6, 1.6), (2.38, 0.0)
"""The radii of a lesion and of the empty space inside, in voxels. Both kinds have the same volume."""
_KINDS = (
    _Kind(_AT_THE_WALL, *_HOLLOW, danger=1.0),
    _Kind(_AT_THE_WALL, *_SOLID, danger=0.3),
    _Kind(_DEEP, *_HOLLOW, danger=0.1),
    _Kind(_DEEP, *_SOLID, danger=0.6),
)
_MEAN_DANGER = 0.5
_EVENNESS = 2.0
"""The parameter of the Dirichlet distribution from which the shares of the four kinds are drawn for each
patient. The larger it is, the more equal the shares are, and the less the mean shape and place say."""
_HAZARD_PER_DANGER = 9.0
_MEAN_TIME, _MEAN_FOLLOW_UP = 1000.0, 1500.0
"""The mean time to the event of a patient with the mean danger, and the mean time until a patient is lost to
follow-up, in days."""


class Outcome(NamedTuple):
    """The outcome of a generated patient."""

    time: float
    """In days."""
    event: bool
    log_hazard: float
    """The true log hazard; no prediction can be better."""


class _Drawn(NamedTuple):
    """The random choices for one patient."""

    organ: NDArray[np.float64]
    """The semi-axes, in voxels."""
    kinds: list[_Kind]
    middles: list[NDArray[np.float64]]
    """Those of the lesions, in voxels from the middle of the volume."""
    offset: float
    noise: NDArray[np.float64]
    """Of standard deviation 1, one for each voxel."""
    outcome: Outcome


def image(seed: int, index: int) -> Tensor:
    """Generate the volume of a patient of the cohort of a seed, (1, 24, 24, 16) in Hounsfield units, the same
    on every call."""
    organ, kinds, middles, offset, noise, _ = _drawn(seed, index)
    inside = np.clip(organ.min() * (1 - _distance(organ)) + 0.5, 0, 1)
    tissue = _OUTSIDE + (_TISSUE - _OUTSIDE) * inside + offset
    voxels = tissue + _NOISE * noise + _LESION * _lesions(kinds, middles)
    return torch.from_numpy(voxels.astype(np.float32))[None]


def outcome(seed: int, index: int) -> Outcome:
    """Generate the outcome of a patient, without building the volume, which takes most of the time."""
    return _drawn(seed, index).outcome


def _drawn(seed: int, index: int) -> _Drawn:
    """Draw everything about one patient from (seed, index): the organ, the lesions, the scanner's offset, the
    noise and the outcome, with exponential times to the event and to the end of follow-up."""
    rng = np.random.default_rng([seed, index])
    organ = rng.uniform(0.9, 1.0) * np.array(_ORGAN)
    num_lesions = int(rng.integers(_NUM_LESIONS[0], _NUM_LESIONS[1] + 1))
    shares = rng.dirichlet(len(_KINDS) * (_EVENNESS,))
    kinds = [_KINDS[number] for number in rng.choice(len(_KINDS), size=num_lesions, p=shares)]
    middles = _middles(rng, organ, kinds)
    log_hazard = _HAZARD_PER_DANGER * (float(np.mean([kind.danger for kind in kinds])) - _MEAN_DANGER)
    offset = rng.normal(0, _OFFSET)
    noise = rng.standard_normal(SIZE)
    # Proportional hazards: the mean time to the event falls with exp(log hazard). Censoring is independent.
    until_event = rng.exponential(_MEAN_TIME * exp(-log_hazard))
    until_lost = rng.exponential(_MEAN_FOLLOW_UP)
    observed = Outcome(min(until_event, until_lost), until_event <= until_lost, log_hazard)
    return _Drawn(organ, kinds, middles, offset, noise, observed)


_AXES = [
    axis - (edge - 1) / 2
    for axis, edge in zip(np.ogrid[tuple(slice(edge) for edge in SIZE)], SIZE, strict=True)
]
"""The coordinates of the voxels from the volume's middle, of shapes that broadcast to SIZE."""


def _distance(unit: NDArray[np.float64], middle: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the scaled distance of each voxel (24, 24, 16) from a point: below 1 inside the ellipsoid with
    the semi-axes `unit` (3,) around the point. The point (3,) is in voxels from the volume's middle, which is
    the default."""
    point = np.zeros(3) if middle is None else middle
    squares = sum(((axis - p) / u) ** 2 for axis, p, u in zip(_AXES, point, unit, strict=True))
    return np.asarray(np.sqrt(squares))


def _middles(
    rng: np.random.Generator, organ: NDArray[np.float64], kinds: list[_Kind]
) -> list[NDArray[np.float64]]:
    """Draw the middle of each lesion, in a random direction and at a depth in the range of its kind, until it
    is at least _APART from the other lesions, or _NUM_TRIES times.

    Args:
        rng: the generator.
        organ: the semi-axes of the organ in voxels, (3,).
        kinds: the kind of each lesion.

    Returns:
        The middles in voxels from the organ's middle, (3,) each.
    """
    middles: list[NDArray[np.float64]] = []
    for kind in kinds:
        for _ in range(_NUM_TRIES):
            drawn = rng.normal(size=3)
            middle = drawn / np.linalg.norm(drawn) * organ * rng.uniform(*kind.depths)
            if all(np.linalg.norm(middle - other) >= _APART for other in middles):
                break
        middles.append(middle)
    return middles


def _lesions(kinds: list[_Kind], middles: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return which share of each voxel (24, 24, 16) is lesion: balls with soft edges, some of them hollow."""
    shares = np.zeros(SIZE)
    for kind, middle in zip(kinds, middles, strict=True):
        distance = _distance(np.ones(3), middle)
        shell = np.clip(kind.radius + 0.5 - distance, 0, 1)
        if kind.hollow:
            shell *= np.clip(distance - kind.hollow + 0.5, 0, 1)
        shares = np.maximum(shares, shell)
    return shares
