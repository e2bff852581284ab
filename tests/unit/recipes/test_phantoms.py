"""The generated volumes: always the same, and as hard as they are said to be."""

from __future__ import annotations

import torch

from nbgpu.recipes.phantoms import phantom


def test_a_phantom_depends_on_its_family_and_number_only() -> None:
    first = phantom(16, seed=3, index=7)
    torch.rand(5)
    phantom(16, seed=3, index=8)
    assert torch.equal(first, phantom(16, seed=3, index=7))
    assert not torch.equal(first, phantom(16, seed=3, index=8))
    assert not torch.equal(first, phantom(16, seed=4, index=7))


def test_a_phantom_is_a_float_volume_from_0_to_1_with_background_and_contrast() -> None:
    volumes = torch.stack([phantom(16, seed=0, index=i) for i in range(32)])
    assert volumes.shape == (32, 1, 16, 16, 16)
    assert volumes.dtype == torch.float32
    assert volumes.min() >= 0
    assert volumes.max() <= 1
    background = (volumes < 0.01).float().mean()
    assert 0.2 < background < 0.8


def test_phantoms_vary_as_much_as_the_published_numbers_assume() -> None:
    volumes = torch.stack([phantom(16, seed=0, index=i) for i in range(256)])
    mse = (volumes - volumes.mean(dim=0)).square().flatten(1).mean(dim=1)
    # The mean image reaches 13.9 dB: easier phantoms would flatter every method that is compared on them.
    assert -10 * mse.log10().mean() < 14.3
