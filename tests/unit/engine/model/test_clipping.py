"""The gradient keeps to the limits of the settings, and the norm that is told is that of before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbgpu.config import train_config
from nbgpu.engine.model.strategy import clip


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip_norm": 0}, [30.0, 40.0]),
        ({"clip_norm": 100}, [30.0, 40.0]),
        ({"clip_norm": 5}, [3.0, 4.0]),
        ({"clip_norm": 0, "clip_value": 35}, [30.0, 35.0]),
        # By value first: [4, 4], whose norm is √32.
        ({"clip_norm": 2, "clip_value": 4}, [2**0.5, 2**0.5]),
    ],
)
def test_the_gradient_keeps_to_both_limits(settings: dict[str, float], expected: list[float]) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([30.0, 40.0])
    norm = clip([weight], train_config("autoencoder", **settings))
    assert float(norm) == pytest.approx(50)
    torch.testing.assert_close(weight.grad, torch.tensor(expected))
