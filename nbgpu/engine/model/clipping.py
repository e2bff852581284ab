"""Cuts the gradient down to what the settings allow."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.model.strategy import whole


def clip(parameters: Iterable[nn.Parameter], config: TrainConfig) -> Tensor:
    """Clips by value first, then by norm; returns the norm before both, a scalar that is the same on every rank.

    A collective where the weights are shared out.
    """
    parameters = list(parameters)
    limit = config.clip_norm or math.inf
    if not config.clip_value:
        return whole(nn.utils.clip_grad_norm_(parameters, limit))
    norm = whole(nn.utils.clip_grad_norm_(parameters, math.inf))
    nn.utils.clip_grad_value_(parameters, config.clip_value)
    nn.utils.clip_grad_norm_(parameters, limit)
    return norm
