"""Reads files with the weights of a network, and compares them with those that a network needs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from nbgpu.errors import DataError

_MAX_SHOWN = 8
_INSIDE = ("state_dict", "model_state_dict", "model", "unet_state_dict")
"""Keys under which the content of a torch file may have the weights. The last one is that of MONAI's MAISI,
also for its autoencoder."""


def read_weights(path: Path, setting: str = "pretrained") -> dict[str, Tensor]:
    """Return the tensors by name, from .safetensors, or from a torch.save file without executing anything in
    it. The prefix 'module.' of DDP is dropped.

    Args:
        path: the file.
        setting: the setting with the path, for messages.

    Raises:
        DataError: there is no such file, or it has no weights.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file. {setting} takes .safetensors or a file of torch.save"
        )
    try:
        content: Any = (
            safetensors.torch.load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: cannot be read as weights: {first_line}") from None
    # Checkpoints nest the weights, sometimes twice, beside other content such as the optimizer's state.
    for name in _INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: holds no tensors by name")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


def require_fit(
    weights: Mapping[str, Tensor], network: Mapping[str, Tensor], source: str, advice: str
) -> None:
    """Raise DataError if the names or shapes of weights are not those that the network needs.

    Args:
        weights: the weights by name.
        network: the weights of the network by name; only their shapes are used.
        source: the setting or file that the weights come from, with which the message begins.
        advice: the end of the message, with the settings to look at.
    """
    if problems := list(misfits(weights, network)):
        raise DataError(f"{source}: the file does not fit: {listed(problems)}. {advice}")


def listed(problems: Sequence[str]) -> str:
    """Return the first problems and the number of the others as one text."""
    more = len(problems) - _MAX_SHOWN
    return "; ".join(problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def misfits(weights: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a phrase for each tensor that is missing, that the network does not have, or that has another
    shape than in the network."""
    for name in sorted(network.keys() - weights.keys()):
        yield f"has no {name} {tuple(network[name].shape)}"
    for name in sorted(weights.keys() - network.keys()):
        yield f"has {name} {tuple(weights[name].shape)}, which the network has not"
    for name in sorted(weights.keys() & network.keys()):
        if weights[name].shape != network[name].shape:
            yield f"{name} is {tuple(weights[name].shape)}, and the network's is {tuple(network[name].shape)}"


def convolutions(
    file: Path, tensors: Mapping[str, Tensor], num_dims: int, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """Return the weights (out, in, k, k, ...) and biases (out,) of the layers of a network of successive
    convolutions.

    Args:
        file: the file, for messages.
        tensors: the content of the file, named `0.weight`, `0.bias`, `1.weight` and so on.
        num_dims: the number of dimensions of the convolutions.
        dtype: the data type of the returned tensors.

    Raises:
        DataError: lists every problem of the file.
    """
    if problems := list(_problems_of_convolutions(tensors, num_dims)):
        raise DataError("\n".join(f"{file}: {problem}" for problem in problems))
    return [
        (tensors[f"{index}.weight"].to(dtype), tensors[f"{index}.bias"].to(dtype))
        for index in range(len(tensors) // 2)
    ]


def _problems_of_convolutions(tensors: Mapping[str, Tensor], num_dims: int) -> Iterator[str]:
    """Yield a message for each problem of the tensors of successive convolutions: a missing weight or bias, a
    wrong shape, input channels other than the output channels of the layer before, NaN, and unexpected
    names."""
    remaining = dict(tensors)
    channels_before: int | None = None
    for index in range(max(1, len(tensors) // 2)):
        weights, biases = remaining.pop(f"{index}.weight", None), remaining.pop(f"{index}.bias", None)
        if weights is None or biases is None:
            yield f"layer {index} needs both {index}.weight and {index}.bias"
            channels_before = None
            continue
        num_out, num_in, *size = weights.shape if weights.ndim == 2 + num_dims else (0, 0)
        if len({*size}) != 1 or size[0] % 2 == 0 or biases.shape != (num_out,):
            yield (
                f"layer {index} has weights {tuple(weights.shape)} and biases {tuple(biases.shape)}; needed are "
                f"(out, in{', k' * num_dims}) with an odd k, and (out,)"
            )
        elif channels_before is not None and num_in != channels_before:
            yield f"layer {index} takes {num_in} channels, and the one before gives {channels_before}"
        elif not (weights.isfinite().all() and biases.isfinite().all()):
            yield f"layer {index} has values that are NaN or infinite"
        channels_before = num_out or None
    if remaining:
        yield f"unexpected names: {', '.join(sorted(remaining))}"
