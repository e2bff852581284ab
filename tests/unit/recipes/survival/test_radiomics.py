"""Features that are computed by hand, and Cox's model of many of them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nbgpu.recipes.survival.baselines import NAMES, fitted_with_chosen_penalty, radiomics, with_products
from nbgpu.recipes.survival.metrics import c_index

SHAPE = (20, 20, 12)


def _features(image: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(NAMES, radiomics(image, dense=0.1), strict=True))


def test_a_box_has_the_features_of_a_box() -> None:
    image = np.full(SHAPE, 0.5)
    image[4:12, 8:10, 5:7] = 0.9
    found = _features(image)
    assert (found["dense voxels"], found["dense regions"], found["size of a region"]) == (32, 1, 32)
    # A box's variances are a twelfth of its edges' squares.
    assert found["elongation of a region"] == pytest.approx(8 / 2)
    assert found["surface by volume"] == 1
    assert found["mean intensity of dense voxels"] == pytest.approx(0.9)
    assert found["standard deviation of dense voxels"] == pytest.approx(0, abs=1e-6)
    middle = ((7.5 - 9.5) / 9.5, (8.5 - 9.5) / 9.5, (5.5 - 5.5) / 5.5)
    assert found["distance of a region from the middle"] == pytest.approx(np.linalg.norm(middle))
    # The inside of a larger box is no surface.
    image[4:12, 4:12, 2:10] = 0.9
    assert _features(image)["surface by volume"] == pytest.approx(1 - 6**3 / 8**3)


def test_regions_are_counted_apart_and_noise_in_no_mean() -> None:
    image = np.zeros(SHAPE)
    image[2:4, 2:4, 2:4] = image[10:14, 10:14, 4:8] = image[18, 18, 1] = 1.0
    found = _features(image)
    assert found["dense regions"] == 3
    assert found["size of a region"] == pytest.approx((8 + 64) / 2)
    assert found["elongation of a region"] == pytest.approx(1)


def test_a_volume_without_dense_voxels_has_features_too() -> None:
    found = _features(np.full(SHAPE, 0.25))
    assert found["mean intensity"] == 0.25
    assert sum(value for name, value in found.items() if name != "mean intensity") == 0


def test_products_of_features_find_what_is_in_none_of_them() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(600, 4))
    times = rng.exponential(np.exp(-1.5 * features[:, 0] * features[:, 1]))
    events = rng.random(600) < 0.8
    own, other = slice(400), slice(400, None)
    reached = []
    for covariates in (features, with_products(features)):
        weights = fitted_with_chosen_penalty(covariates[own], times[own], events[own], "efron", seed=0)
        reached.append(c_index(covariates[other] @ weights, times[other], events[other]))
    assert with_products(features).shape == (600, 4 + 10)
    assert reached[0] < 0.6
    assert reached[1] > 0.68
