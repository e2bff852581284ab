"""Reading of a network's weights from a local file, without running anything that is in it."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from nbgpu.errors import DataError

_INSIDE = ("state_dict", "model_state_dict", "model", "unet_state_dict")
"""Keys under which a torch file may hold the weights, beside other things. MONAI's MAISI has the last one,
also for its autoencoder."""
_MAX_SHOWN = 8


def read_weights(path: Path, setting: str) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors or torch.save file by name, on the CPU.

    The prefix 'module.', which DataParallel adds, is dropped.

    Args:
        path: the file.
        setting: the setting that names the file, for messages.

    Raises:
        DataError: the file is not there, cannot be read, or holds no tensors by name.
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
    for name in _INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: holds no tensors by name")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


def require_fit(
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    told: str,
    advice: str,
    optional: Collection[str] = (),
) -> None:
    """Raise DataError, with names and shapes, if the weights are not those of the network.

    Args:
        weights, expected, optional: as `misfits` takes them.
        told: the setting or file that the message begins with.
        advice: the settings to look at.
    """
    if problems := list(misfits(weights, expected, optional)):
        raise DataError(f"{told}: the file does not fit: {listed(problems)}. {advice}")


def misfits(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], optional: Collection[str] = ()
) -> Iterator[str]:
    """Yield a phrase for each tensor that is missing, unexpected or of another shape.

    Args:
        weights: the tensors of the file.
        expected: the network's own tensors, of which only the shapes count.
        optional: names that the file may lack.
    """
    for name in sorted(expected.keys() - weights.keys() - set(optional)):
        yield f"has no {name} {tuple(expected[name].shape)}"
    for name in sorted(weights.keys() - expected.keys()):
        yield f"has {name} {tuple(weights[name].shape)}, which the network has not"
    for name in sorted(weights.keys() & expected.keys()):
        shape, needed = tuple(weights[name].shape), tuple(expected[name].shape)
        if shape != needed:
            yield f"{name} is {shape}, and the network's is {needed}"


def listed(problems: list[str]) -> str:
    """Join the phrases of `misfits`, and leave out all but the first few."""
    more = len(problems) - _MAX_SHOWN
    return "; ".join(problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
