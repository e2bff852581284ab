"""The learning rate and the warm-up that a first training has by default."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.config import TrainConfig, train_config


@pytest.mark.parametrize(
    ("settings", "lr"),
    [
        ({}, 4e-3),
        ({"channels": (16, 16, 8)}, 4e-3),
        ({"channels": (16, 32)}, 1e-3),
        ({"channels": (32, 64)}, 5e-4),
        ({"channels": (256, 128, 64)}, 1e-4),
        ({"channels": (32, 64), "lr": 4e-3}, 4e-3),
        # Files have a rate of their own, whatever the network.
        ({"channels": (8, 16), "data": "/data/brains"}, 1e-4),
        ({"channels": (32, 64), "data": "/data/brains"}, 1e-4),
    ],
)
def test_wider_networks_have_a_smaller_rate(settings: dict[str, Any], lr: float) -> None:
    assert train_config("autoencoder", **settings).lr == lr


@pytest.mark.parametrize(("channels", "lr"), [((8, 16), 4e-3), ((32, 64), 2e-3), ((64, 128), 1e-3)])
def test_so_do_wider_networks_of_diffusion(channels: tuple[int, ...], lr: float) -> None:
    assert train_config("diffusion", channels=channels).lr == lr


@pytest.mark.parametrize(
    ("total_steps", "warmup_steps"), [(1, 0), (2, 1), (12, 6), (20, 10), (199, 10), (200, 10), (1000, 50)]
)
def test_a_short_run_has_a_warm_up_too(total_steps: int, warmup_steps: int) -> None:
    assert TrainConfig(steps=total_steps).num_warmup_steps(total_steps, 8) == warmup_steps
    assert TrainConfig(steps=total_steps, warmup_steps=0).num_warmup_steps(total_steps, 8) == 0
