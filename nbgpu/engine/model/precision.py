"""The numbers that a run computes with: mixed precision, and how exact and how repeatable the device's kernels are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.backends import cuda, cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nbgpu.config import TrainConfig

_AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def dtype(config: TrainConfig) -> torch.dtype:
    """Of weights and data."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """In it the device computes with fewer bits where that does no harm, if the settings say so."""
    return torch.autocast(device.type, dtype=_AMP_DTYPES[config.amp], enabled=config.amp != "off")


@contextmanager
def kernels(config: TrainConfig) -> Iterator[None]:
    """In it torch takes the kernels that the settings ask for; afterwards it is as it was, for the cells."""
    before = (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = config.tf32
    cudnn.benchmark = config.cudnn == "benchmark"
    cudnn.deterministic = config.cudnn == "deterministic"
    if config.cudnn == "deterministic":
        # Some kernels of 3D networks have no deterministic form: they say so, and the run goes on.
        torch.use_deterministic_algorithms(True, warn_only=True)
    with ExitStack() as stack:
        if config.sdpa != "auto":
            stack.enter_context(sdpa_kernel(_SDPA_BACKENDS[config.sdpa]))
        try:
            yield
        finally:
            matmul, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, algorithms, warn_only = before
            torch.set_float32_matmul_precision(matmul)
            torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """What a loss is computed with: half precision is too coarse for sums, float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
