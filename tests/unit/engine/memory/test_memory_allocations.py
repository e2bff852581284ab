"""The record of the memory that tensors take, and the scratch memory of convolutions."""

from __future__ import annotations

import pytest
import torch

from nbgpu.engine.dry_run.fake_steps import scratch_bytes
from nbgpu.engine.memory.allocations import AllocationLog
from nbgpu.engine.memory.trace import trace_memory

CPU = torch.device("cpu")

WITHOUT_AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX512",
    reason="with AVX-512 oneDNN computes convolutions of 16 bits, whose scratch memory the tests of whole steps hold",
)


def test_the_parts_at_the_peak_add_up() -> None:
    log = AllocationLog()
    log.allocate(1, 100)
    log.allocate(2, 30)
    log.free(2)
    log.allocate(2, 50)  # the same address, for something else
    log.label("gradients", [2])
    log.label("optimizer", [2, 7])
    log.allocate_scratch(20)
    log.free(2)
    log.allocate(3, 60)
    log.label("parameters", [1])
    assert log.peak_bytes == 170
    parts = {name: num_bytes for name, num_bytes in log.bytes_at_peak().items() if num_bytes}
    assert parts == {"parameters": 100, "gradients": 50, "scratch": 20}


def test_what_is_held_when_a_claim_is_made_is_all_that_it_covers() -> None:
    log = AllocationLog()
    log.allocate(1, 10)
    log.allocate(2, 20)
    log.label("parameters", [1])
    log.label("buckets", None)
    log.allocate(3, 30)
    assert {k: v for k, v in log.bytes_at_peak().items() if v} == {
        "parameters": 10,
        "buckets": 20,
        "activations": 30,
    }


@pytest.mark.parametrize(
    ("batch", "channels", "size", "stride", "dtype"),
    [
        (8, (16, 16), 12, 1, torch.float32),
        (4, (16, 32), 12, 2, torch.float32),
        (2, (32, 32), 2, 1, torch.float32),
        pytest.param(4, (24, 16), 12, 1, torch.bfloat16, marks=WITHOUT_AVX512),
        pytest.param(2, (16, 32), 12, 2, torch.bfloat16, marks=WITHOUT_AVX512),
    ],
)
def test_the_scratch_of_a_convolution_is_what_its_kernel_takes(
    batch: int, channels: tuple[int, int], size: int, stride: int, dtype: torch.dtype
) -> None:
    image = torch.randn(batch, channels[0], size, size, size, dtype=dtype)
    weight = torch.randn(channels[1], channels[0], 3, 3, 3, dtype=dtype)
    shape = ([stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    result = torch.ops.aten.convolution(image, weight, None, *shape)
    args = (torch.ones_like(result), image, weight, None, *shape, [True, True, False])
    backward = torch.ops.aten.convolution_backward.default
    with trace_memory(CPU) as trace:
        results = backward(*args)
    kept_bytes = sum(tensor.nbytes for tensor in results if tensor is not None)
    scratch = trace.log.peak_bytes - kept_bytes
    assert trace.log.bytes_at_peak()["scratch"] > 0
    if torch.backends.mkldnn.is_available():
        assert scratch_bytes(backward, args, results) == pytest.approx(scratch, rel=0.1)
