"""Baselines: Cox's model with covariates that are computed by hand, which a network should outperform."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nbgpu.recipes.survival.cox import Ties, cox_loss
from nbgpu.recipes.survival.metrics import Flags, Floats, c_index

_PENALTIES = (1e-3, 1e-2, 1e-1)
_NUM_FOLDS = 5
_MOST_STEPS = 1000


def fitted(
    covariates: NDArray[np.float64], times: Floats, events: Flags, ties: Ties, penalty: float = 1e-4
) -> Floats:
    """Fit the weights (F,) of covariates (N, F) that maximize the partial likelihood.

    The penalty on the squares of the weights (ridge) keeps them finite if a covariate separates all events.
    """
    x, t, e = (torch.as_tensor(values) for values in (covariates, times, events))
    weights = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    # scipy's L-BFGS-B has OpenBLAS share tiny matrices among all cores, which takes ten times as long on two
    # cores, and longer on more.
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
