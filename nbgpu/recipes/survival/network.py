"""A 3D ResNet that maps a volume to its log hazard, and pretrained weights for it from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets import resnet
from torch import Tensor, nn

from nbgpu.recipes.weight_files import read_weights, require_fit


class SurvivalNetwork(nn.Module):
    """MONAI's 3D ResNet, followed by one linear layer on the features of the ResNet and of the table.

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
        """Build MONAI's ResNet without its classification head. With pretrained weights, its shortcuts are of
        the type that these need, and they are loaded."""
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
        # BatchNorm's running statistics must not change while the ResNet is frozen.
        self.encoder.train(self.training and not frozen)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            encoded = self.encoder(image)
        scores: Tensor = self.head(torch.cat([encoded, features.to(encoded.dtype)], dim=1))
        return scores.flatten()


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load a ResNet's weights by name, from .safetensors, or from a torch.save file without executing
    anything in it.

    The prefixes 'module.' and 'encoder.' of the names are removed, and the last layer is left out.

    Raises:
        DataError: there is no such file, or it has no weights.
    """
    weights = {name.removeprefix("encoder."): value for name, value in read_weights(path).items()}
    return {name: value for name, value in weights.items() if not name.startswith(("fc.", "head."))}


def _shortcuts(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return arguments of MONAI's ResNet that make shortcuts of the type that the weights have: MedicalNet's
    networks have different ones."""
    return {
        "shortcut_type": "B" if any(".downsample." in name for name in weights) else "A",
        "bias_downsample": any(name.endswith(".downsample.0.bias") for name in weights),
    }


def _load(encoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the ResNet's weights; DataError lists names and shapes that do not fit."""
    # Files from old versions of torch lack BatchNorm's counters, which it needs only with momentum=None.
    expected = {
        name: value
        for name, value in encoder.state_dict().items()
        if name in weights or not name.endswith("num_batches_tracked")
    }
    require_fit(weights, expected, "pretrained", "See resnet, widen_factor and the file's own network")
    encoder.load_state_dict(dict(weights), strict=False)
