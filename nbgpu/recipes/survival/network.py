"""A 3D ResNet that maps a volume to its log hazard, and pretrained weights for it from a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from monai.networks.nets import resnet
from safetensors import SafetensorError
from torch import Tensor, nn

from nbgpu.errors import DataError

_MAX_SHOWN = 8
_INSIDE = ("state_dict", "model_state_dict", "model")
"""Keys under which a torch file may hold the weights, beside other things."""


class SurvivalNetwork(nn.Module):
    """MONAI's 3D ResNet, followed by one linear layer on its features and the table's together.

    Args:
        name: 'resnet18' to 'resnet152'.
        num_features: the number of features of the table for each patient.
        widen_factor: the first stage has 64 times this many channels.
        stem_stride: the stride of the first convolution.
        pretrained: the ResNet's weights, as `load_weights` returns them; None leaves them random.
    """

    def __init__(
        self,
        name: str,
        num_features: int = 0,
        widen_factor: float = 1.0,
        stem_stride: int = 1,
        pretrained: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.encoder: resnet.ResNet = getattr(resnet, name)(
            spatial_dims=3,
            n_input_channels=1,
            feed_forward=False,
            widen_factor=widen_factor,
            conv1_t_stride=stem_stride,
            **({} if pretrained is None else _shortcuts(pretrained)),
        )
        # A bias would not change the partial likelihood.
        self.head = nn.Linear(self.encoder.in_planes + num_features, 1, bias=False)
        if pretrained is not None:
            _load(self.encoder, pretrained)

    def forward(self, image: Tensor, features: Tensor, frozen: bool = False) -> Tensor:
        """Compute the log hazards (N,) of volumes (N, 1, D, H, W) and standardised features (N, F).

        With `frozen`, only the last layer learns, and the ResNet's normalisation runs in evaluation mode.
        """
        self.encoder.train(self.training and not frozen)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            found = self.encoder(image)
        scores: Tensor = self.head(torch.cat([found, features.to(found.dtype)], dim=1))
        return scores.flatten()


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load a ResNet's weights by name, from .safetensors, or from a torch.save file without executing
    anything in it.

    The prefixes 'module.' and 'encoder.' of the names, and the file's own last layer, are dropped. Raises
    DataError.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file. pretrained takes .safetensors or a file of torch.save"
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
    weights = {
        str(name).removeprefix("module.").removeprefix("encoder."): value for name, value in content.items()
    }
    return {name: value for name, value in weights.items() if not name.startswith(("fc.", "head."))}


def _shortcuts(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the type of the shortcuts of the ResNet that the weights come from: MedicalNet has several
    types."""
    return {
        "shortcut_type": "B" if any(".downsample." in name for name in weights) else "A",
        "bias_downsample": any(name.endswith(".downsample.0.bias") for name in weights),
    }


def _load(encoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = encoder.state_dict()
    # Files from old versions of torch lack these counters, which only a momentum of None needs.
    needed = {name for name in own if not name.endswith("num_batches_tracked")}
    problems = [f"has no {name}" for name in sorted(needed - weights.keys())]
    problems += [f"has {name}, which the network has not" for name in sorted(weights.keys() - own.keys())]
    problems += [
        f"{name} is {tuple(value.shape)}, and the network's is {tuple(own[name].shape)}"
        for name, value in sorted(weights.items())
        if name in own and value.shape != own[name].shape
    ]
    if problems:
        more = len(problems) - _MAX_SHOWN
        listed = "; ".join(problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise DataError(
            f"pretrained: the file does not fit: {listed}. See resnet, widen_factor and the file's own network"
        )
    encoder.load_state_dict(dict(weights), strict=False)
