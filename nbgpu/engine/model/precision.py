"""The precision of a run: its dtypes, mixed precision, and the exactness and determinism of the device's
kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """Return the dtype of weights and data."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def as_inputs(
    config: TrainConfig, batch: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a batch on the device as the model takes it: floating-point numbers in the dtype of the weights,
    and volumes (N, C, D, H, W) with the channels last in memory if the settings say so."""

    def moved(value: torch.Tensor) -> torch.Tensor:
        is_volume = config.channels_last and value.dim() == 5
        return value.to(
            device,
            dtype(config) if value.is_floating_point() else value.dtype,
            non_blocking=config.non_blocking,
            memory_format=torch.channels_last_3d if is_volume else torch.preserve_format,
        )

    return {name: moved(value) for name, value in batch.items()}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return an autocast context in the dtype of the setting `amp`; it changes nothing if that is 'off'."""
    return torch.autocast(device.type, dtype=_AMP_DTYPES[config.amp], enabled=config.amp != "off")


def emulates_16_bits() -> bool:
    """Return whether this processor lacks AVX-512, without which oneDNN has no convolutions of 16 bits.

    torch then computes them in a kernel that is not vectorized: a forward pass in bfloat16 took 95 times as
    long as in float32 (3 x 3 x 3, 24 channels, AMD EPYC with AVX2, torch 2.13).
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def slow_on_cpu(config: TrainConfig, device: torch.device) -> Iterator[str]:
    """Yield a sentence if mixed precision makes the run slower on this device by far."""
    if config.amp != "off" and device.type == "cpu" and emulates_16_bits():
        yield (
            f"amp={config.amp!r} is many times slower than amp='off' here: this processor has no AVX-512, and torch "
            "emulates convolutions of 16 bits"
        )


@contextmanager
def kernels(config: TrainConfig) -> Iterator[None]:
    """Apply the settings of torch's kernels (TF32, cuDNN, determinism, attention) in a block, and restore the
    cells' settings after it."""
    before = (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if config.tf32 is not None:
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = config.tf32
    cudnn.benchmark = config.cudnn == "benchmark"
    cudnn.deterministic = config.cudnn == "deterministic"
    if config.cudnn == "deterministic":
        # Some kernels of 3D networks have no deterministic version: they warn, and the run goes on.
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
    """Convert half precision, which is too coarse for the sums of a loss, to float32; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
