"""Noise over time, what a network may predict of it, the few times that are visited, and the step from one to
the next.

Times t count from 0, almost no noise, to T - 1, almost nothing else. abar(t) is the share of the signal's
variance that is left: x_t = sqrt(abar) x0 + sqrt(1 - abar) epsilon (Ho et al. 2020, arXiv 2006.11239).

MONAI's DDIMScheduler goes back by T / (number of steps) each time, and its DDPMScheduler by 1. The short
schedules here have other distances, so that the steps are told where they go; where MONAI can take them they
are MONAI's.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from monai.networks.schedulers import DDPMScheduler
from torch import Tensor

BetaSchedule = Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"]
"""MONAI's names."""
Prediction = Literal["epsilon", "x0", "v"]
Spacing = Literal["uniform", "uniform-from-0", "non-uniform", "all"]
Variance = Literal["small", "large"]

NON_UNIFORM = (0, 199, 399, 599, 699, 799, 849, 899, 949, 999)
"""Fast-DDPM's, for T = 1000: closer together where there is more noise."""
DEFAULT_NUM_POINTS = {"uniform": 11, "uniform-from-0": 10, "non-uniform": len(NON_UNIFORM)}


def times(spacing: Spacing, num_points: int | None = None, num_times: int = 1000) -> Tensor:
    """The times that a sampler visits, rising, (num_points,): as many as the network is asked.

    Args:
        spacing: 'uniform': 0, and from there on the last of each of num_points - 1 equal parts, as Fast-DDPM
            has them (0, 99, 199, ..., 999: 11 points, though called 10 there); 'uniform-from-0': the first of
            each of num_points equal parts (0, 100, ..., 900), which never reaches T - 1; 'non-uniform':
            NON_UNIFORM; 'all': every time.
        num_points: None takes 11, 10, 10, and `num_times`.
        num_times: T.
    """
    if spacing == "all":
        return torch.arange(num_times)
    if spacing == "non-uniform":
        if num_points not in (None, len(NON_UNIFORM)) or num_times != NON_UNIFORM[-1] + 1:
            raise ValueError(f"the non-uniform times are {len(NON_UNIFORM)} of 1000")
        return torch.tensor(NON_UNIFORM)
    count = num_points or DEFAULT_NUM_POINTS[spacing]
    if not 2 <= count <= num_times:
        raise ValueError(f"num_points={count} must be from 2 to {num_times}")
    if spacing == "uniform":
        return torch.tensor([0, *(k * num_times // (count - 1) - 1 for k in range(1, count))])
    return torch.tensor([k * num_times // count for k in range(count)])


def antithetic(num_samples: int, num_points: int, device: torch.device | str = "cpu") -> Tensor:
    """Random indices into the points, (num_samples,): each with its mirror image, so that a batch has early
    and late times."""
    drawn = torch.randint(num_points, ((num_samples + 1) // 2,), device=device)
    return torch.stack([drawn, num_points - 1 - drawn], dim=1).flatten()[:num_samples]


class Noise:
    """How much noise there is at each of T times, and the steps between them.

    Tensors of any shape (N, ...), times (N,) or one.

    Args:
        num_times: T.
        betas: MONAI's schedule; beta(t) is the variance that the step to t adds.
        beta_start, beta_end: of the first and the last step, where the schedule takes them (all but
            'cosine').
    """

    def __init__(
        self,
        num_times: int = 1000,
        betas: BetaSchedule = "linear_beta",
        beta_start: float = 1e-4,
        beta_end: float = 0.02,
    ) -> None:
        ends: dict[str, Any] = {} if betas == "cosine" else {"beta_start": beta_start, "beta_end": beta_end}
        self.num_times = num_times
        # In float32, as MONAI keeps it, 1 - abar of the first times is off by a part in 6000.
        steps = DDPMScheduler(num_times, betas, **ends).betas.double()
        self.abar: list[float] = torch.cumprod(1 - steps, dim=0).tolist()
        self._tables: dict[torch.device, Tensor] = {}

    def _parts(self, t: Tensor | int, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(abar), sqrt(1 - abar) for the samples of `like`."""
        if like.device not in self._tables:
            self._tables[like.device] = torch.tensor(self.abar, dtype=torch.float64, device=like.device)
        abar = self._tables[like.device][t].reshape(-1, *[1] * (like.ndim - 1))
        return abar.sqrt().to(like.dtype), (1 - abar).sqrt().to(like.dtype)

    def add(self, x0: Tensor, epsilon: Tensor, t: Tensor | int) -> Tensor:
        """x_t."""
        signal, noise = self._parts(t, x0)
        return signal * x0 + noise * epsilon

    def target(self, kind: Prediction, x0: Tensor, epsilon: Tensor, t: Tensor | int) -> Tensor:
        """What a network that predicts `kind` should say. v = sqrt(abar) epsilon - sqrt(1 - abar) x0
        (Salimans & Ho 2022)."""
        if kind == "x0":
            return x0
        if kind == "epsilon":
            return epsilon
        signal, noise = self._parts(t, x0)
        return signal * epsilon - noise * x0

    def split(
        self, kind: Prediction, predicted: Tensor, x_t: Tensor, t: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """(x0, epsilon) as a prediction has them."""
        signal, noise = self._parts(t, x_t)
        if kind == "x0":
            return predicted, (x_t - signal * predicted) / noise
        if kind == "epsilon":
            return (x_t - noise * predicted) / signal, predicted
        return signal * x_t - noise * predicted, signal * predicted + noise * x_t

    def ddim(
        self, x0: Tensor, epsilon: Tensor, t: int, t_next: int, eta: float = 0.0, drawn: Tensor | None = None
    ) -> Tensor:
        """The sample at t_next < t, or clean where t_next is -1 (Song et al. 2021, arXiv 2010.02502, formulas
        12 and 16).

        Args:
            x0, epsilon: as predicted from the sample at t, (N, ...).
            eta: 0 adds no noise; 1 adds as much as the posterior has.
            drawn: standard normal, (N, ...); needed where eta > 0.
        """
        abar, abar_next = self.abar[t], self._abar_next(t_next)
        sigma = eta * math.sqrt((1 - abar_next) / (1 - abar) * (1 - abar / abar_next))
        stepped = math.sqrt(abar_next) * x0 + math.sqrt(max(0.0, 1 - abar_next - sigma**2)) * epsilon
        if sigma == 0:
            return stepped
        assert drawn is not None
        return stepped + sigma * drawn

    def posterior(
        self, x_t: Tensor, x0: Tensor, t: int, t_next: int, variance: Variance, drawn: Tensor
    ) -> Tensor:
        """A sample of q(x_next | x_t, x0), or its mean, which is x0, where t_next is -1 (Ho et al. 2020,
        formulas 6 and 7).

        Args:
            variance: 'small': the posterior's own; 'large': that of the step from t_next to t.
            drawn: standard normal, (N, ...).
        """
        abar, abar_next = self.abar[t], self._abar_next(t_next)
        beta = 1 - abar / abar_next
        mean = math.sqrt(abar_next) * beta / (1 - abar) * x0
        mean = mean + math.sqrt(1 - beta) * (1 - abar_next) / (1 - abar) * x_t
        if t_next < 0:
            return mean
        spread = beta if variance == "large" else (1 - abar_next) / (1 - abar) * beta
        return mean + math.sqrt(spread) * drawn

    def _abar_next(self, t_next: int) -> float:
        return 1.0 if t_next < 0 else self.abar[t_next]
