"""The networks whose features a perceptual distance compares, without their weights.

torchvision is not needed: the parts that are used are short lists of layers. Their parameters have the names
of the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from monai.networks.nets import resnet
from torch import Tensor, nn

_VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512)
"""Channels of the convolutions up to the last features that LPIPS takes."""


@dataclass(frozen=True)
class Architecture:
    """A network for whose weights there is a published file."""

    title: str
    kind: Literal["lpips", "medicalnet"]
    build: Callable[[], nn.Module]
    """Makes the network with random weights, in training mode. It returns a list of features."""
    linear_file: str = ""
    """What LPIPS calls the file of its linear layers, without the suffix."""
    tapped_channels: tuple[int, ...] = ()
    """Channels of the features that LPIPS weighs."""
    min_edge: int = 1
    """The shortest edge of an image from which all features can be made, in pixels."""


class Stack(nn.Module):
    """Layers one after another, which returns the output of some of them.

    Args:
        layers: the layers; their parameters are named features.0.weight and so on.
        taps: the places of the layers whose output is returned, in ascending order.
    """

    def __init__(self, layers: Iterable[nn.Module], taps: Sequence[int]) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.taps = tuple(taps)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for place, layer in enumerate(self.features):
            x = layer(x)
            if place in self.taps:
                found.append(x)
        return found


class Fire(nn.Module):
    """SqueezeNet's module: a narrow 1 x 1 convolution, then 1 x 1 and 3 x 3 convolutions side by side."""

    def __init__(self, num_in: int, num_squeezed: int, num_expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(num_in, num_squeezed, 1)
        self.expand1x1 = nn.Conv2d(num_squeezed, num_expanded, 1)
        self.expand3x3 = nn.Conv2d(num_squeezed, num_expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu_()
        return torch.cat([self.expand1x1(x), self.expand3x3(x)], dim=1).relu_()


def _alexnet() -> nn.Module:
    """Build AlexNet's convolutions (Krizhevsky, arXiv 1404.5997)."""
    layers = [nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(True), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(True), nn.MaxPool2d(3, 2)]
    for num_in, num_out in pairwise((192, 384, 256, 256)):
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(True)]
    return Stack(layers, taps=(1, 4, 7, 9, 11))


def _vgg16() -> nn.Module:
    """Build VGG's configuration D (Simonyan & Zisserman, ICLR 2015)."""
    layers: list[nn.Module] = []
    num_in = 3
    for one in _VGG16:
        if isinstance(one, int):
            layers += [nn.Conv2d(num_in, one, 3, padding=1), nn.ReLU(True)]
            num_in = one
        else:
            layers.append(nn.MaxPool2d(2))
    return Stack(layers, taps=(3, 8, 15, 22, 29))


def _squeezenet() -> nn.Module:
    """Build SqueezeNet 1.1 (Iandola et al., arXiv 1602.07360)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(True)]
    for fires in (
        [(64, 16, 64), (128, 16, 64)],
        [(128, 32, 128), (256, 32, 128)],
        [(256, 48, 192), (384, 48, 192), (384, 64, 256), (512, 64, 256)],
    ):
        layers += [nn.MaxPool2d(3, 2, ceil_mode=True), *(Fire(*channels) for channels in fires)]
    return Stack(layers, taps=(1, 4, 7, 9, 10, 11, 12))


class MedicalNet(nn.Module):
    """MedicalNet's ResNet (Chen et al., arXiv 1904.00625), which returns the output of its last stage.

    It is MONAI's ResNet, but that the last two stages keep the resolution and have dilated convolutions.

    Args:
        block: 'basic' or 'bottleneck'.
        num_blocks: the blocks of each of the four stages.
    """

    def __init__(self, block: str, num_blocks: list[int]) -> None:
        super().__init__()
        self.resnet = resnet.ResNet(
            block,
            num_blocks,
            block_inplanes=resnet.get_inplanes(),
            n_input_channels=1,
            conv1_t_stride=2,
            feed_forward=False,
            bias_downsample=False,
        )
        for stage, dilation in ((self.resnet.layer3, 2), (self.resnet.layer4, 4)):
            for layer in stage.modules():
                if isinstance(layer, nn.Conv3d):
                    layer.stride = (1, 1, 1)
                    if layer.kernel_size == (3, 3, 3):
                        layer.dilation = layer.padding = (dilation,) * 3

    def forward(self, x: Tensor) -> list[Tensor]:
        net = self.resnet
        x = net.maxpool(net.act(net.bn1(net.conv1(x))))
        return [net.layer4(net.layer3(net.layer2(net.layer1(x))))]


ARCHITECTURES = (
    Architecture("AlexNet", "lpips", _alexnet, "alex", (64, 192, 384, 256, 256), min_edge=31),
    Architecture("VGG16", "lpips", _vgg16, "vgg", (64, 128, 256, 512, 512), min_edge=16),
    Architecture(
        "SqueezeNet 1.1", "lpips", _squeezenet, "squeeze", (64, 128, 256, 384, 384, 512, 512), min_edge=17
    ),
    Architecture("MedicalNet's ResNet-10", "medicalnet", lambda: MedicalNet("basic", [1, 1, 1, 1])),
    Architecture("MedicalNet's ResNet-50", "medicalnet", lambda: MedicalNet("bottleneck", [3, 4, 6, 3])),
)


def own_network(layers: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    """Return successive 3D convolutions with ReLU, which halve the resolution before each but the first.

    Args:
        layers: weights (out, in, k, k, k) with an odd k, and biases (out,), of each.
    """
    parts: list[nn.Module] = []
    taps = []
    for weights, biases in layers:
        num_out, num_in, size, *_ = weights.shape
        convolution = nn.Conv3d(num_in, num_out, size, padding="same")
        convolution.weight, convolution.bias = nn.Parameter(weights), nn.Parameter(biases)
        parts += [*([nn.AvgPool3d(2)] if parts else []), convolution, nn.ReLU()]
        taps.append(len(parts) - 1)
    return Stack(parts, taps)
