"""The statistics of BatchNorm on CPU ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nbgpu.engine.model.build import CpuSyncBatchNorm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_are_as_exact_as_those_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One rank: the sum over all ranks is its own.
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    torch.manual_seed(0)
    # The sum of a channel is far beyond what fp16 can hold.
    values = (100 + 3 * torch.randn(2, 4, 16, 16, 16)).to(dtype)
    layer, reference = CpuSyncBatchNorm(4), torch.nn.BatchNorm3d(4)
    found, expected = values.clone().requires_grad_(), values.float().requires_grad_()
    normalised, wanted = layer(found), reference(expected)
    assert normalised.dtype == dtype
    # The last digit of the type, and what float32 loses beside a mean of 100.
    last_digit = 2 * torch.finfo(dtype).eps * wanted.abs().max() + 1e-5
    assert (normalised.float() - wanted).abs().max() <= last_digit
    assert layer.running_mean == pytest.approx(reference.running_mean, rel=1e-5)
    assert layer.running_var == pytest.approx(reference.running_var, rel=1e-4)
    weights = torch.randn_like(wanted)
    (normalised.float() * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    difference = (found.grad.float() - expected.grad).abs().max()
    assert difference <= 4 * torch.finfo(dtype).eps * expected.grad.abs().max() + 1e-5
