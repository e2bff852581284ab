"""`sdpa` decides which kernel scaled_dot_product_attention takes, seen in torch's own profile of a model that
calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from nbgpu.config import train_config
from nbgpu.engine.model import precision

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"


class Attention(nn.Module):
    """One layer of self-attention with two heads, over (batch, tokens, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 3 * 16)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.into(tokens).chunk(3, -1)
        )
        return scaled_dot_product_attention(query, key, value)


def kernels_of(sdpa: Any) -> set[str]:
    model, tokens = Attention(), torch.randn(2, 5, 16)
    with (
        precision.kernels(train_config("diffusion", attention_edges=(8,), sdpa=sdpa)),
        profile(activities=[ProfilerActivity.CPU]) as seen,
    ):
        model(tokens).sum().backward()
    return {event.key for event in seen.key_averages()} & {FLASH, MATH}


@pytest.mark.parametrize(("sdpa", "kernel"), [("math", MATH), ("flash", FLASH), ("auto", FLASH)])
def test_the_kernel_is_the_one_that_was_asked_for(sdpa: str, kernel: str) -> None:
    assert kernels_of(sdpa) == {kernel}
    # Outside of a run the cells have torch's own choice.
    assert kernels_of("auto") == {FLASH}


def test_a_kernel_that_the_device_does_not_have_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="No viable backend"):
        kernels_of("efficient")


@pytest.mark.parametrize(
    ("tf32", "convolutions", "products"), [(None, True, False), (True, True, True), (False, False, False)]
)
def test_tf32_is_as_torch_has_it_unless_it_is_asked_for(
    tf32: bool | None, convolutions: bool, products: bool
) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    # torch's own defaults, as in a plain script.
    assert before == (True, False)
    with precision.kernels(train_config("autoencoder", tf32=tf32)):
        assert torch.backends.cudnn.allow_tf32 == convolutions
        assert torch.backends.cuda.matmul.allow_tf32 == products
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


@pytest.mark.parametrize(("capability", "is_slow"), [("AVX2", True), ("AVX512", False), ("DEFAULT", False)])
def test_emulated_convolutions_of_16_bits_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capability: str, is_slow: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpu = torch.device("cpu")
    notes = list(precision.slow_on_cpu(train_config("autoencoder", amp="bf16"), cpu))
    assert [note.startswith("amp='bf16' is many times slower") for note in notes] == [True] * is_slow
    assert not list(precision.slow_on_cpu(train_config("autoencoder"), cpu))
    assert not list(precision.slow_on_cpu(train_config("autoencoder", amp="bf16"), torch.device("cuda")))
