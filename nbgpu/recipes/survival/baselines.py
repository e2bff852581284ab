"""Baselines: Cox's model with covariates that are computed by hand, which a network should outperform."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from nbgpu.recipes.survival.cox import Ties, cox_loss
from nbgpu.recipes.survival.metrics import Flags, Floats, c_index

_PENALTIES = (1e-3, 1e-2, 1e-1)
_NUM_FOLDS = 5


def fitted(
    covariates: NDArray[np.float64], times: Floats, events: Flags, ties: Ties, penalty: float = 1e-4
) -> Floats:
    """Fit the weights (F,) of covariates (N, F) that maximize the partial likelihood.

    The penalty on the squares of the weights (ridge) keeps them finite if a covariate separates all events.
    """
    x, t, e = (torch.as_tensor(values) for values in (covariates, times, events))

    def value_and_gradient(weights: Floats) -> tuple[float, Floats]:
        w = torch.tensor(weights, requires_grad=True)
        loss = cox_loss(x @ w, t, e, ties) + penalty * w.square().sum()
        loss.backward()
        assert w.grad is not None
        return float(loss.detach()), w.grad.numpy()

    found = minimize(value_and_gradient, np.zeros(covariates.shape[1]), jac=True, method="L-BFGS-B")
    return np.asarray(found.x)


def fitted_with_chosen_penalty(
    covariates: NDArray[np.float64], times: Floats, events: Flags, ties: Ties, seed: int
) -> Floats:
    """Fit the weights (F,) of many covariates (N, F), with the penalty under which five folds of these
    patients are ordered best."""
    folds = np.random.RandomState(seed).permutation(len(times)) % _NUM_FOLDS

    def order(penalty: float) -> float:
        scores = np.zeros(len(times))
        for fold in range(_NUM_FOLDS):
            own, other = folds != fold, folds == fold
            if events[own].any():
                weights = fitted(covariates[own], times[own], events[own], ties, penalty)
                scores[other] = covariates[other] @ weights
        return float(np.nan_to_num(c_index(scores, times, events), nan=0.5))

    return fitted(covariates, times, events, ties, max(_PENALTIES, key=order))
