"""Baseline: Cox's model with a few covariates, which a network should outperform."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from nbgpu.recipes.survival.cox import Ties, cox_loss
from nbgpu.recipes.survival.metrics import Flags, Floats


def fitted(covariates: NDArray[np.float64], times: Floats, events: Flags, ties: Ties) -> Floats:
    """Fit the weights (F,) of covariates (N, F) that maximize the partial likelihood.

    A small penalty keeps the weights finite if a covariate separates all events.
    """
    x, t, e = (torch.as_tensor(values) for values in (covariates, times, events))

    def value_and_gradient(weights: Floats) -> tuple[float, Floats]:
        w = torch.tensor(weights, requires_grad=True)
        loss = cox_loss(x @ w, t, e, ties) + 1e-4 * w.square().sum()
        loss.backward()
        assert w.grad is not None
        return float(loss.detach()), w.grad.numpy()

    found = minimize(value_and_gradient, np.zeros(covariates.shape[1]), jac=True, method="L-BFGS-B")
    return np.asarray(found.x)
