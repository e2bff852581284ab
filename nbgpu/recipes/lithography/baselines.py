"""What a network is held against: a blur that knows nothing of the lens, and the lens itself with as many
kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nbgpu.config import LithographyConfig
from nbgpu.recipes.lithography.resist import blurred
from nbgpu.recipes.lithography.samples import imager_of, optics_of, source_of


def best_blur(masks: Tensor, aerials: Tensor) -> float:
    """Return the blur, in pixels, with which the squared blurred masks (N, 1, H, W) come closest to their
    images."""
    sigmas = np.arange(0.5, 6.0, 0.1)
    errors = [float((blurred(masks, s).square() - aerials).square().mean()) for s in sigmas]
    return float(sigmas[int(np.argmin(errors))])


def num_systems(config: LithographyConfig) -> int:
    """Return the number of complex kernels that are as many as the network's real ones, of which two make
    one; at most all of the source's points."""
    return min(config.num_kernels // 2, len(source_of(config).points()))


def socs_images(config: LithographyConfig, masks: Tensor) -> Tensor:
    """Return the images of masks (N, 1, H, W) by SOCS with the lens of the settings and `num_systems`
    kernels."""
    lens = optics_of(config), source_of(config)
    imager = imager_of(*lens, masks.shape[-1], config.pixel, num_systems(config))
    return torch.cat([imager(part) for part in torch.split(masks, config.batch_size)])
