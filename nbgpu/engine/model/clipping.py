"""Clips the gradient to the limits of the settings."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.model.strategy import whole


def clip(parameters: Iterable[nn.Parameter], config: TrainConfig) -> Tensor:
    """Clip by value first, then by norm; return the norm before both, a scalar that is the same on every
    rank.

    A collective if the weights are sharded.
    """
    parameters = list(parameters)
    limit = config.clip_norm or math.inf
    if not config.clip_value:
        return whole(nn.utils.clip_grad_norm_(parameters, limit))
    norm = whole(nn.utils.clip_grad_norm_(parameters, math.inf))
    nn.utils.clip_grad_value_(parameters, config.clip_value)
    nn.utils.clip_grad_norm_(parameters, limit)
    return norm
