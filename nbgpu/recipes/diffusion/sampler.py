"""Sampling of images from noise, conditioned on the other modalities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.model.precision import at_least_float32
from nbgpu.recipes.diffusion import schedules
from nbgpu.recipes.diffusion.config import DiffusionConfig
from nbgpu.recipes.diffusion.schedules import Noise


class Sampler:
    """A sampler that draws images with a trained network, according to the settings.

    The noise of each case is determined by (seed, number of the case) alone, so it does not depend on the
    batch, the rank or the number of ranks.
    """

    def __init__(self, config: DiffusionConfig) -> None:
        self.config = config
        self.noise = Noise(config.num_times, config.betas, config.beta_start, config.beta_end)
        self.times = schedules.times(config.spacing, config.sampling_steps, config.num_times)
        """The visited times in ascending order, on the CPU; the network is called once for each."""

    @torch.no_grad()
    def __call__(self, model: nn.Module, condition: Tensor, numbers: Sequence[int], last: int = 0) -> Tensor:
        """Return sampled images (N, 1, D, H, W) from -1 to 1, in float32 or float64.

        Args:
            model: the network, on the condition's device; it takes (N, 1 + channels, D, H, W) and times (N,).
            condition: the other modalities, (N, channels, D, H, W).
            numbers: the numbers of the cases, which determine their noise.
            last: the index of the last time that is visited; the result is the network's estimate of the
                clean image at that time.
        """
        network = model.module if isinstance(model, DistributedDataParallel) else model
        config = self.config
        generators = [_generator(config.seed, number) for number in numbers]
        x = self._drawn(generators, condition)
        visited = self.times.tolist()[last:]
        for index in reversed(range(len(visited))):
            t, t_next = visited[index], visited[index - 1] if index else -1
            at = torch.full((len(x),), t, device=x.device)
            said = at_least_float32(network(torch.cat([x, condition], dim=1).to(condition.dtype), at))
            x0, epsilon = self.noise.split(config.prediction, said, x, t)
            x0 = x0.clamp(-1, 1) if config.clip else x0
            if index == 0:
                # Both samplers end with the estimate of the clean image.
                return x0.clamp(-1, 1)
            if config.sampler == "posterior":
                x = self.noise.posterior(x, x0, t, t_next, config.variance, self._drawn(generators, x))
            else:
                drawn = self._drawn(generators, x) if config.eta else None
                x = self.noise.ddim(x0, epsilon, t, t_next, config.eta, drawn)
        raise AssertionError("there is at least one time")

    def noisy(self, clean: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x_t, epsilon, t); a case always gets the same noise and a time determined by its number."""
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
    (state,) = np.random.SeedSequence([seed, number, use]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))
