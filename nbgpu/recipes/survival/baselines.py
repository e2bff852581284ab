"""Baselines that the network should outperform: Cox's linear model with radiomic features, which are computed
from the volumes by formulas."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from nbgpu.recipes.survival.cox import Ties, cox_loss
from nbgpu.recipes.survival.metrics import Flags, Floats, c_index

_PENALTIES = (1e-3, 1e-2, 1e-1)
_NUM_FOLDS = 5
_MOST_STEPS = 1000

NAMES = (
    "mean intensity",
    "standard deviation",
    "dense voxels",
    "dense regions",
    "size of a region",
    "elongation of a region",
    "distance of a region from the middle",
    "surface by volume",
    "mean intensity of dense voxels",
    "standard deviation of dense voxels",
)
_SMALLEST = 4
"""Regions with fewer voxels are noise, and are left out of the means over regions."""
_TOUCHING = np.ones((3, 3, 3), dtype=bool)
"""Voxels that share a corner belong to one region."""


def fitted(
    covariates: NDArray[np.float64], times: Floats, events: Flags, ties: Ties, penalty: float = 1e-4
) -> Floats:
    """Fit the weights (F,) of covariates (N, F) that maximize the partial likelihood.

    The penalty on the squares of the weights (ridge) keeps them finite if a covariate separates all events.
    """
    x, t, e = (torch.as_tensor(values) for values in (covariates, times, events))
    weights = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    # With scipy's L-BFGS-B, OpenBLAS divides tiny matrices among all cores, which takes ten times as long on
    # two cores, and longer on more.
    optimizer = torch.optim.LBFGS([weights], max_iter=_MOST_STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = cox_loss(x @ weights, t, e, ties) + penalty * weights.square().sum()
        value.backward()
        return float(value.detach())

    optimizer.step(loss)
    return np.asarray(weights.detach())


def fitted_with_chosen_penalty(
    covariates: NDArray[np.float64], times: Floats, events: Flags, ties: Ties, seed: int
) -> Floats:
    """Fit the weights (F,) of many covariates (N, F). The penalty is the one of _PENALTIES with the highest
    C-index in a cross-validation over five folds of the patients."""
    folds = np.random.RandomState(seed).permutation(len(times)) % _NUM_FOLDS

    def cross_validated(penalty: float) -> float:
        """Return the C-index with this penalty, where the patients of each fold are scored by weights that
        were fitted to the other folds; 0.5 if there is no comparable pair."""
        scores = np.zeros(len(times))
        for fold in range(_NUM_FOLDS):
            training = folds != fold
            if events[training].any():
                weights = fitted(covariates[training], times[training], events[training], ties, penalty)
                scores[~training] = covariates[~training] @ weights
        return float(np.nan_to_num(c_index(scores, times, events), nan=0.5))

    return fitted(covariates, times, events, ties, max(_PENALTIES, key=cross_validated))


def radiomics(image: NDArray[np.floating], dense: float) -> NDArray[np.float64]:
    """Return the features of a volume, in the order of NAMES.

    They are of the kinds that the Image Biomarker Standardisation Initiative describes (Zwanenburg et al.
    2020): first-order statistics, and number, size, elongation, place and surface of the regions of dense
    voxels. If no voxel is dense, the features of regions are 0.

    Args:
        image: the volume (D, H, W), from 0 to 1.
        dense: a voxel is dense if its value is more than this above the median.
    """
    mask = image - np.median(image) > dense
    first_order = [float(image.mean()), float(image.std()), float(mask.sum())]
    if not mask.any():
        return np.array([*first_order, *([0.0] * (len(NAMES) - len(first_order)))])
    labels, num_regions = ndimage.label(mask, _TOUCHING)
    sizes, elongations, distances = _regions(labels, num_regions)
    counted = sizes >= _SMALLEST
    # A voxel is on the surface if erosion removes it, that is, if one of its six neighbours is outside.
    surface = mask & ~ndimage.binary_erosion(mask)
    inside = image[mask].astype(np.float64)
    return np.array(
        [
            *first_order,
            float(num_regions),
            *(
                float(one[counted].mean()) if counted.any() else 0.0
                for one in (sizes, elongations, distances)
            ),
            float(surface.sum() / mask.sum()),
            float(inside.mean()),
            float(inside.std()),
        ]
    )


def _regions(
    labels: NDArray[np.int32], num_regions: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Measure the regions of labels 1 to `num_regions`.

    Returns:
        For each region, (R,) each: the number of its voxels; its elongation, the ratio of the longest to the
        shortest principal axis; and the distance of its centre from that of the volume, where the distance
        from the volume's centre to a face counts as 1 along each axis.
    """
    indices = np.argwhere(labels)
    numbers = labels[tuple(indices.T)] - 1
    sizes = np.bincount(numbers, minlength=num_regions).astype(np.float64)
    half = (np.array(labels.shape) - 1) / 2
    offsets = (indices - half).T
    # The covariance matrix of the coordinates in each region, from sums over its voxels.
    means = np.stack([np.bincount(numbers, axis, num_regions) for axis in offsets]) / sizes
    products = np.array(
        [[np.bincount(numbers, a * b, num_regions) / sizes for a in offsets] for b in offsets]
    )
    # A voxel is a cube with edge 1, which adds its own variance of 1/12 along each axis.
    covariances = products - means[None] * means[:, None] + np.eye(3)[..., None] / 12
    variances = np.linalg.eigvalsh(covariances.transpose(2, 0, 1))
    distances = np.sqrt(((means / np.maximum(half, 0.5)[:, None]) ** 2).sum(axis=0))
    return sizes, np.sqrt(variances[:, 2] / variances[:, 0]), distances


def with_products(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return standardised features (N, F) with all their squares and products, (N, F + F (F + 1) / 2)."""
    first, second = np.triu_indices(features.shape[1])
    return np.concatenate([features, features[:, first] * features[:, second]], axis=1)
