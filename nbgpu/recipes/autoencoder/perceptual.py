"""Perceptual distances between images. Nothing is downloaded: the filters are random, or come from a local
file."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from nbgpu.engine.model.precision import at_least_float32
from nbgpu.errors import DataError

Layer = tuple[Tensor, Tensor]
"""Weights (out, in, k, k, k) with an odd k, and biases (out,)."""

_RANDOM_CHANNELS = (1, 16, 32)
_RANDOM_SIZE = 3


def spectral_distance(output: Tensor, image: Tensor) -> Tensor:
    """Return the mean squared difference of the amplitudes of all frequencies (Dhariwal et al., arXiv
    2005.00341), a scalar.

    The values are those of MONAI's JukeboxLoss, whose gradient is NaN where an amplitude is 0.

    Args:
        output, image: (N, C, D, H, W).
    """
    amplitudes = [
        torch.fft.fftn(at_least_float32(one), dim=(2, 3, 4), norm="ortho").abs() for one in (output, image)
    ]
    return functional.mse_loss(*amplitudes)


def feature_distance(output: Tensor, image: Tensor, network: str) -> Tensor:
    """Return the mean squared difference of a frozen network's features (Johnson et al., ECCV 2016),
    averaged over the layers, a scalar.

    Each layer is a convolution with ReLU; from the second layer on, the resolution is halved first.

    Args:
        output, image: (N, 1, D, H, W).
        network: a network as `layers_of` takes it.
    """
    layers = layers_of(network)
    both = torch.cat([at_least_float32(output), at_least_float32(image)])
    # The grey volume is repeated for a network with several channels.
    both = both.expand(-1, layers[0][0].shape[1], -1, -1, -1)
    distances = []
    for index, layer in enumerate(layers):
        both = _convolved(both, layer, halve=index > 0)
        of_output, of_image = at_least_float32(both).chunk(2)
        distances.append(functional.mse_loss(of_output, of_image))
    return torch.stack(distances).mean()


def _convolved(x: Tensor, layer: Layer, halve: bool) -> Tensor:
    weights, biases = (part.to(x.device, x.dtype) for part in layer)
    x = functional.avg_pool3d(x, 2) if halve else x
    return functional.conv3d(x, weights, biases, padding="same").relu()


def layers_of(network: str) -> list[Layer]:
    """Return the frozen network that a setting names: 'random', or a file for `_read_layers`, which may raise
    DataError."""
    return _random_layers() if network == "random" else _read_layers(network)


@cache
def _random_layers() -> list[Layer]:
    """Return two layers of random filters with mean 0 (He et al. 2015), the same each time."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for num_in, num_out in pairwise(_RANDOM_CHANNELS):
        weights = torch.randn(num_out, num_in, *(_RANDOM_SIZE,) * 3, generator=generator)
        weights -= weights.mean(dim=(2, 3, 4), keepdim=True)
        weights *= (2 / (num_in * _RANDOM_SIZE**3)) ** 0.5
        layers.append((weights, torch.zeros(num_out)))
    return layers


@cache
def _read_layers(path: str) -> list[Layer]:
    """Read successive convolutions, `0.weight`, `0.bias`, `1.weight` and so on, from a safetensors file.

    Raises:
        DataError: the message lists all problems of the file.
    """
    try:
        tensors = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as a safetensors file of network weights: {error}") from None
    layers: list[Layer] = []
    problems = []
    num_given: int | None = None
    for index in range(max(1, len(tensors) // 2)):
        weights, biases = tensors.pop(f"{index}.weight", None), tensors.pop(f"{index}.bias", None)
        if weights is None or biases is None:
            problems.append(f"layer {index} needs both {index}.weight and {index}.bias")
            continue
        num_out, num_in, *size = weights.shape if weights.ndim == 5 else (0, 0)
        if len({*size}) != 1 or size[0] % 2 == 0 or biases.shape != (num_out,):
            problems.append(
                f"layer {index} has weights {tuple(weights.shape)} and biases {tuple(biases.shape)}; needed are "
                "(out, in, k, k, k) with an odd k, and (out,)"
            )
        elif num_given is not None and num_in != num_given:
            problems.append(f"layer {index} takes {num_in} channels, and the one before gives {num_given}")
        elif not (weights.isfinite().all() and biases.isfinite().all()):
            problems.append(f"layer {index} has values that are NaN or infinite")
        num_given = num_out or None
        layers.append((weights.float(), biases.float()))
    if tensors:
        problems.append(f"unexpected names: {', '.join(sorted(tensors))}")
    if problems:
        raise DataError("\n".join(f"{path}: {problem}" for problem in problems))
    return layers
