"""Noise schedules, prediction targets, and sampling: the times at which the network is evaluated, the steps
between these times, and the sampler.

Times t run from 0, almost no noise, to T - 1, almost pure noise. abar(t), the cumulative product of alphas,
is the share of the signal's variance that is left: x_t = sqrt(abar) x0 + sqrt(1 - abar) epsilon (Ho et al.
2020, arXiv 2006.11239).

MONAI's DDIMScheduler always steps back by T / (number of steps), and its DDPMScheduler by 1. The short
schedules here have other distances, so that the step functions take the next time as an argument. For steps
that MONAI supports, their results are those of MONAI.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from monai.networks.schedulers import DDPMScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.model import randomness
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.recipes.diffusion.config import DiffusionConfig

BetaSchedule = Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"]
"""Noise schedules, by their names in MONAI."""
Prediction = Literal["epsilon", "x0", "v"]
Spacing = Literal["uniform", "uniform-from-0", "non-uniform", "all"]
Variance = Literal["small", "large"]

NON_UNIFORM = (0, 199, 399, 599, 699, 799, 849, 899, 949, 999)
"""Fast-DDPM's non-uniform times for T = 1000, closer together where there is more noise."""
DEFAULT_NUM_POINTS = {"uniform": 11, "uniform-from-0": 10, "non-uniform": len(NON_UNIFORM)}


def times(spacing: Spacing, num_points: int | None = None, num_times: int = 1000) -> Tensor:
    """Return the times at which a sampler evaluates the network, in ascending order, (num_points,) in int64.

    Args:
        spacing: 'uniform': 0, and then the last time of each of num_points - 1 equal parts, as in Fast-DDPM
            (0, 99, 199, ..., 999: 11 points, though called 10 there); 'uniform-from-0': the first time of
            each of num_points equal parts (0, 100, ..., 900), which never reaches T - 1; 'non-uniform':
            NON_UNIFORM; 'all': every time.
        num_points: the number of times; None stands for 11, 10, 10 and `num_times`, respectively.
        num_times: T, the number of times in the noise schedule.
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
        if 2 * (count - 1) > num_times:
            raise ValueError(f"num_points={count} of {num_times} times visit one twice: at most half of them")
        return torch.tensor([0, *(k * num_times // (count - 1) - 1 for k in range(1, count))])
    return torch.tensor([k * num_times // count for k in range(count)])


def antithetic(
    num_samples: int,
    num_points: int,
    place: randomness.Place,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw a random index into the times for each sample of a micro-batch, (num_samples,) in int64, from 0 to
    `num_points` - 1.

    The samples of an optimizer step form pairs: if the first has index i, the second has num_points - 1 - i
    (antithetic variates). So a step has early and late times in equal number, which lowers the variance of
    its loss. Each index follows from the step's seed and the sample's number in the step, so that the indices
    do not depend on how ranks and micro-batches divide the step.
    """
    drawn = []
    for sample in range(place.first_sample, place.first_sample + num_samples):
        (state,) = np.random.SeedSequence([*place.seed, sample // 2]).generate_state(1, np.uint64)
        index = int(state) % num_points
        drawn.append(num_points - 1 - index if sample % 2 else index)
    # A copy from pinned memory is asynchronous. Any other copy would wait until the GPU has finished all the
    # work in its stream.
    is_on_gpu = torch.device(device).type == "cuda"
    indices = torch.empty(num_samples, dtype=torch.int64, pin_memory=is_on_gpu)
    return indices.copy_(torch.tensor(drawn)).to(device, non_blocking=True)


class Noise:
    """A noise schedule over T times, and the steps between these times.

    Tensors have any shape (N, ...); times are (N,) or a single number.

    Args:
        num_times: T, the number of times.
        betas: the name of MONAI's schedule; beta(t) is the variance that the step to t adds.
        beta_start, beta_end: beta of the first and of the last step, if the schedule takes them (all but
            'cosine' do).
    """

    def __init__(
        self,
        num_times: int = 1000,
        betas: BetaSchedule = "linear_beta",
        beta_start: float = 1e-4,
        beta_end: float = 0.02,
    ) -> None:
        """Compute abar(t) in float64 from MONAI's betas."""
        ends: dict[str, Any] = {} if betas == "cosine" else {"beta_start": beta_start, "beta_end": beta_end}
        self.num_times = num_times
        # In float32, which MONAI uses, 1 - abar of the first times is off by a part in 6000.
        steps = DDPMScheduler(num_times, betas, **ends).betas.double()
        self.abar: list[float] = torch.cumprod(1 - steps, dim=0).tolist()
        self._tables: dict[torch.device, Tensor] = {}

    def _parts(self, t: Tensor | int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sqrt(abar(t)), sqrt(1 - abar(t))) in the precision of `like` (N, ...), each of a shape that
        broadcasts to it: (N, 1, ...) for times (N,)."""
        if like.device not in self._tables:
            self._tables[like.device] = torch.tensor(self.abar, dtype=torch.float64, device=like.device)
        abar = self._tables[like.device][t].reshape(-1, *[1] * (like.ndim - 1))
        return abar.sqrt().to(like.dtype), (1 - abar).sqrt().to(like.dtype)

    def add(self, x0: Tensor, epsilon: Tensor, t: Tensor | int) -> Tensor:
        """Return x_t, the noisy sample at time t."""
        signal, noise = self._parts(t, x0)
        return signal * x0 + noise * epsilon

    def target(self, kind: Prediction, x0: Tensor, epsilon: Tensor, t: Tensor | int) -> Tensor:
        """Return the target for a network that predicts `kind`; v is sqrt(abar) epsilon - sqrt(1 - abar) x0
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
        """Return (x0, epsilon), computed from the prediction of the network by solving
        x_t = sqrt(abar) x0 + sqrt(1 - abar) epsilon."""
        signal, noise = self._parts(t, x_t)
        if kind == "x0":
            return predicted, (x_t - signal * predicted) / noise
        if kind == "epsilon":
            return (x_t - noise * predicted) / signal, predicted
        return signal * x_t - noise * predicted, signal * predicted + noise * x_t

    def ddim(
        self, x0: Tensor, epsilon: Tensor, t: int, t_next: int, eta: float = 0.0, drawn: Tensor | None = None
    ) -> Tensor:
        """Return the DDIM sample at time t_next < t, or the clean sample if t_next is -1 (Song et al. 2021,
        arXiv 2010.02502, formulas 12 and 16).

        Args:
            x0, epsilon: the predictions from the sample at time t, (N, ...).
            t, t_next: the time of the sample, and that of the returned one.
            eta: 0 adds no noise; 1 adds as much as the posterior has.
            drawn: standard normal noise, (N, ...); needed if eta > 0.
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
        """Return a sample of q(x_next | x_t, x0), or its mean, which is x0, if t_next is -1 (Ho et al. 2020,
        formulas 6 and 7).

        Args:
            x_t: the sample at time t, (N, ...).
            x0: the prediction of the clean sample, (N, ...).
            t, t_next: the time of the sample, and that of the returned one.
            variance: 'small': the variance of the posterior; 'large': that of the step from t_next to t.
            drawn: standard normal noise, (N, ...).
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


class Sampler:
    """A sampler that draws images with a trained network, according to the settings.

    The noise of each case is determined by (seed, number of the case) alone, so it does not depend on the
    batch, the rank or the number of ranks.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        self.config = config
        self.noise = Noise(config.num_times, config.betas, config.beta_start, config.beta_end)
        self.times = times(config.spacing, config.sampling_steps, config.num_times)
        """The times at which the network is evaluated, in ascending order, on the CPU."""

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, condition: Tensor, numbers: Sequence[int], stop_at: int = 0
    ) -> Tensor:
        """Return sampled images (N, 1, D, H, W) from -1 to 1, in float32 or float64.

        Args:
            model: the network, on the condition's device; it takes (N, 1 + channels, D, H, W) and times (N,).
            condition: the other modalities, (N, channels, D, H, W).
            numbers: the numbers of the cases, which determine their noise.
            stop_at: the index in `times` of the last time at which the network is evaluated; its estimate of
                the clean image at that time is the result.
        """
        # DDP's forward pass may call collectives, and the ranks have different numbers of cases.
        network = model.module if isinstance(model, DistributedDataParallel) else model
        config = self.config
        generators = [_generator(config.seed, number) for number in numbers]
        x = self._drawn(generators, condition)
        descending = self.times.tolist()[stop_at:][::-1]
        for t, t_next in zip_longest(descending, descending[1:]):
            at = torch.full((len(x),), t, device=x.device)
            predicted = at_least_float32(network(torch.cat([x, condition], dim=1).to(condition.dtype), at))
            x0, epsilon = self.noise.split(config.prediction, predicted, x, t)
            x0 = x0.clamp(-1, 1) if config.clip else x0
            if t_next is None:
                # Both samplers end with the estimate of the clean image.
                return x0.clamp(-1, 1)
            if config.sampler == "posterior":
                x = self.noise.posterior(x, x0, t, t_next, config.variance, self._drawn(generators, x))
            else:
                drawn = self._drawn(generators, x) if config.eta else None
                x = self.noise.ddim(x0, epsilon, t, t_next, config.eta, drawn)
        raise AssertionError("there is at least one time")

    def noisy(self, clean: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x_t, epsilon, t) for a validation: noisy images and noise (N, 1, D, H, W), and times (N,).

        Noise and time of a case follow from its number alone, so that the losses of two validations differ
        only by the network.
        """
        # The last number makes this noise another one than that with which sampling begins.
        generators = [_generator(self.config.seed, number, 1) for number in numbers]
        epsilon = self._drawn(generators, clean)
        t = self.times[torch.tensor(numbers) % len(self.times)].to(clean.device)
        return self.noise.add(clean, epsilon, t), epsilon, t

    def _drawn(self, generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
        """Return standard normal noise (N, 1, D, H, W), drawn on the CPU so that it is the same on every
        device."""
        shape = (1, *like.shape[2:])
        drawn = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
        return at_least_float32(drawn.to(like.device, like.dtype))


def _generator(seed: int, number: int, use: int = 0) -> torch.Generator:
    """Return a random generator on the CPU whose state depends on the three numbers alone.

    Args:
        seed: the run's seed.
        number: the number of the case.
        use: the purpose of the random numbers: 0 for sampling, 1 for a validation.
    """
    (state,) = np.random.SeedSequence([seed, number, use]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))
