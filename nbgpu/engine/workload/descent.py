"""Minimises a function of one tensor, each process for itself: with L-BFGS or scipy's optimizers, which
support bounds, or with torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from scipy.optimize import Bounds, OptimizeResult, minimize
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RMSprop

from nbgpu.engine.workload.lbfgs import ALL_DONE, AfterStep, Lbfgs, describe_nonfinite
from nbgpu.engine.workload.shards import Shards
from nbgpu.errors import RunError

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns (loss, gradient) for a tensor."""

LBFGS = "lbfgs"
"""The optimizer whose vectors can be spread over the ranks."""

_SCIPY: Mapping[str, str] = {"lbfgsb": "L-BFGS-B", "tnc": "TNC"}
_TORCH: Mapping[str, Callable[..., Optimizer]] = {
    "adam": Adam,
    "adamax": Adamax,
    "nadam": NAdam,
    "rmsprop": RMSprop,
    "sgd": SGD,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
}
OPTIMIZERS = (LBFGS, *_SCIPY, *_TORCH)

NUM_PAIRS = 10
"""The default number of pairs (step, change of the gradient) that L-BFGS and L-BFGS-B remember; scipy's."""
_MAX_EVALUATIONS_PER_STEP = 50


class _AllStepsDone(Exception):
    """Ends TNC after the last step, because TNC has no limit on the number of steps."""


def bounded(optimizer: str) -> bool:
    """Return whether the optimizer keeps the tensor within 0 and 1; with the others only the loss can do
    so."""
    return optimizer in (LBFGS, *_SCIPY)


def descend(
    evaluate: Evaluate,
    start: Tensor,
    num_steps: int,
    after_step: AfterStep,
    *,
    optimizer: str = LBFGS,
    num_pairs: int = NUM_PAIRS,
    lr: Callable[[], float] = lambda: 0.01,
    tolerance: float = 1e-10,
) -> str:
    """Minimise until a step reduces the loss by less than `tolerance`, or for `num_steps` steps.

    Args:
        evaluate: returns the loss and its gradient. With L-BFGS and scipy's optimizers a step may need more
            than one call.
        start: the initial tensor, float64 on any device. It is not changed.
        num_steps: the largest number of steps.
        after_step: see `AfterStep`.
        optimizer: one of `OPTIMIZERS`. 'lbfgs', 'lbfgsb' (Byrd et al. 1995) and 'tnc' keep to 0..1.
        num_pairs: how many pairs 'lbfgs' and 'lbfgsb' remember.
        lr: returns the learning rate of torch's optimizers, and is called before each step.
        tolerance: a share of the loss, or of 1 if that is larger; 0 disables it.

    Returns:
        The reason why it ended, as a text.

    Raises:
        RunError: loss or gradient are NaN or infinite.
    """
    if num_steps < 1:
        return "no steps were left"

    def checked(tensor: Tensor) -> tuple[float, Tensor]:
        """Evaluate loss and gradient; RunError if they are not finite."""
        # No optimizer recovers from NaN and infinity.
        loss, gradient = evaluate(tensor)
        value = float(loss)
        if not (math.isfinite(value) and bool(gradient.isfinite().all())):
            raise RunError(describe_nonfinite(value, float(gradient.norm()), has_lr=optimizer in _TORCH))
        return value, gradient

    if optimizer == LBFGS:
        shards = Shards(start.shape if start.ndim > 1 else (1, *start.shape))

        def part(tensor: Tensor) -> tuple[float, Tensor]:
            loss, gradient = checked(tensor.view(start.shape))
            return loss, shards.part(gradient.view(shards.shape))

        return Lbfgs(shards, num_pairs, start.device).minimise(
            part,
            start.view(shards.shape),
            num_steps,
            lambda tensor, loss: after_step(tensor.view(start.shape), loss),
            tolerance,
        )
    if optimizer in _SCIPY:
        return _with_scipy(checked, start, num_steps, after_step, optimizer, num_pairs, tolerance)
    return _with_torch(checked, start, num_steps, after_step, optimizer, lr, tolerance)


def _with_scipy(
    evaluate: Callable[[Tensor], tuple[float, Tensor]],
    start: Tensor,
    num_steps: int,
    after_step: AfterStep,
    optimizer: str,
    num_pairs: int,
    tolerance: float,
) -> str:
    """Minimise with one of scipy's optimizers, on the CPU, within the bounds 0 and 1; return the reason why
    it ended."""

    def as_tensor(flat: np.ndarray) -> Tensor:
        return torch.from_numpy(flat.copy()).view(start.shape).to(start.device)

    newest_loss = math.nan

    def evaluate_flat(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (loss, gradient) as scipy calls it, with flat arrays on the CPU."""
        nonlocal newest_loss
        newest_loss, gradient = evaluate(as_tensor(flat))
        return newest_loss, gradient.cpu().numpy().ravel()

    # scipy finds out by the name of the parameter that this callback takes a result and not a point.
    def take_result(intermediate_result: OptimizeResult) -> None:
        after_step(as_tensor(intermediate_result.x), float(intermediate_result.fun))

    num_done = 0

    def take_point(flat: np.ndarray) -> None:
        """TNC's callback after a step, which does not get the loss."""
        nonlocal num_done
        num_done += 1
        after_step(as_tensor(flat), newest_loss)
        if num_done == num_steps:
            raise _AllStepsDone

    is_lbfgsb = optimizer == "lbfgsb"
    # Only the tolerance of the loss ends the search: the other criteria are set to 0.
    options: dict[str, float] = {
        "ftol": tolerance,
        "gtol": 0.0,
        "maxfun": num_steps * _MAX_EVALUATIONS_PER_STEP,
        **({"maxiter": num_steps, "maxcor": num_pairs} if is_lbfgsb else {"xtol": 0.0}),
    }
    try:
        result = minimize(
            evaluate_flat,
            start.cpu().numpy().ravel(),
            jac=True,
            method=_SCIPY[optimizer],
            bounds=Bounds(0.0, 1.0),
            callback=take_result if is_lbfgsb else take_point,
            options=options,
        )
    except _AllStepsDone:
        return ALL_DONE
    reason = str(result.message).lower()
    return ALL_DONE if "total no. of iterations" in reason else reason


def _with_torch(
    evaluate: Callable[[Tensor], tuple[float, Tensor]],
    start: Tensor,
    num_steps: int,
    after_step: AfterStep,
    optimizer: str,
    lr: Callable[[], float],
    tolerance: float,
) -> str:
    """Minimise with one of torch's optimizers; return the reason why it ended."""
    tensor = start.detach().clone().requires_grad_()
    steps = _TORCH[optimizer]([tensor], lr=lr())
    before = math.inf
    for _ in range(num_steps):
        for group in steps.param_groups:
            group["lr"] = lr()
        loss, tensor.grad = evaluate(tensor.detach())
        steps.step()
        after_step(tensor.detach().clone(), loss)
        if math.isfinite(before) and abs(before - loss) <= tolerance * max(abs(before), abs(loss), 1.0):
            return "a step gained less than the tolerance"
        before = loss
    return ALL_DONE
