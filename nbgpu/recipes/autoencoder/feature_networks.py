"""The frozen networks whose features a perceptual distance compares, with random weights or those of local
files.

torchvision is not needed: the parts that are used are short lists of layers. Their parameters have the names
of the published files.

Nothing is downloaded. A published file is recognised by the names and shapes of its tensors: torchvision's
alexnet, vgg16 and squeezenet1_1 with LPIPS's linear layers beside them, MedicalNet's ResNets, or 3D
convolutions of the user's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Literal

import torch
from monai.networks.nets import resnet
from torch import Tensor, nn

from nbgpu.errors import DataError
from nbgpu.recipes.weight_files import convolutions, listed, misfits, read_weights

_VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512)
"""Output channels of VGG16's convolutions, up to the last features that LPIPS compares."""
_CONVOLUTION = re.compile(r"\d+\.(weight|bias)")
"""The names of tensors in a file of successive convolutions."""
_LPIPS_CONVOLUTION = re.compile(r"net\.slice\d+\.(\d+\..*)")
"""The names of convolutions in a file of LPIPS with the network."""
_LINEAR = re.compile(r"lin(\d+)\.model\.\d+\.weight")
"""The names of LPIPS's linear layers."""
_UNUSED_PREFIXES = ("classifier.", "fc.", "lin", "scaling_layer.")
"""Prefixes of tensors in published files that the features do not need."""
_SUFFIXES = (".pth", ".pt", ".safetensors")
_RANDOM_CHANNELS = (1, 16, 32)
_RANDOM_SIZE = 3


@dataclass(frozen=True)
class Architecture:
    """A network with published weights."""

    title: str
    kind: Literal["lpips", "medicalnet"]
    build: Callable[[], nn.Module]
    """Builds the network with random weights, in training mode. The network returns a list of features."""
    linear_file: str = ""
    """The name of LPIPS's file of linear layers for this network, without the suffix."""
    tapped_channels: tuple[int, ...] = ()
    """Channels of the features that LPIPS compares, for each tapped layer."""
    min_edge: int = 1
    """The shortest edge of an image from which all features can be made, in pixels."""


class Stack(nn.Module):
    """Layers in sequence; the outputs of some layers, the tapped ones, are returned as features.

    Args:
        layers: the layers; their parameters are named features.0.weight and so on.
        taps: the indices of the layers whose output is returned, in ascending order.
    """

    def __init__(self, layers: Iterable[nn.Module], taps: Sequence[int]) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.taps = tuple(taps)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the tapped layers, in order, for images (N, C, ...)."""
        features = []
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index in self.taps:
                features.append(x)
        return features


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
    for num_out in _VGG16:
        if isinstance(num_out, int):
            layers += [nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(True)]
            num_in = num_out
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

    It differs from MONAI's ResNet in its last two stages, which keep the resolution and have dilated
    convolutions.

    Args:
        block: 'basic' or 'bottleneck'.
        num_blocks: the blocks of each of the four stages.
    """

    def __init__(self, block: str, num_blocks: list[int]) -> None:
        """Build MONAI's ResNet without the classification head, and dilate its last two stages."""
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
        # MONAI's ResNet has no setting for dilation. A Conv3d reads its stride, dilation and padding in each
        # forward pass, so changing these attributes is enough.
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


def convolution_network(layers: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    """Build a network of successive 3D convolutions with ReLU and tap each ReLU. The resolution is halved
    before each convolution but the first.

    Args:
        layers: the weights (out, in, k, k, k), with an odd k, and biases (out,) of each convolution.
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


@dataclass(frozen=True)
class FeatureNetwork:
    """A frozen network on the CPU whose features a perceptual distance compares."""

    module: nn.Module
    """The network, which returns a list of features."""
    architecture: Architecture | None
    """The published architecture; None for random filters and the user's own convolutions."""
    linear: tuple[Tensor, ...]
    """LPIPS's weights (1, C, 1, 1) of the channels of each features; empty for other networks."""
    words: str
    """The network and its files in words, for messages."""


def load_feature_network(network: str, linear: str) -> FeatureNetwork:
    """Build the frozen network that the settings name.

    The result is cached: a file is read again only after its size or modification time has changed.

    Args:
        network: the setting perceptual_network: 'random', or a file.
        linear: the setting perceptual_linear: a file, or '' for one beside the network's.

    Raises:
        DataError: the message lists all problems of the files.
    """
    if network == "random":
        return _random()
    file, linear_file = Path(network).expanduser(), Path(linear).expanduser() if linear else None
    beside = [
        file.with_name(a.linear_file + suffix) for a in ARCHITECTURES if a.linear_file for suffix in _SUFFIXES
    ]
    return _read(file, linear_file, tuple(map(_stamp, [file, linear_file, *beside])))


def _stamp(file: Path | None) -> tuple[int, int] | None:
    """Return (modification time in ns, size in bytes) of a file, which change with its content; None if there
    is no file."""
    if file is None or not file.is_file():
        return None
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


@cache
def _random() -> FeatureNetwork:
    """Return two layers of random 3D filters with mean 0 (He et al. 2015), drawn from a fixed seed: the same
    in every process."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for num_in, num_out in pairwise(_RANDOM_CHANNELS):
        weights = torch.randn(num_out, num_in, *(_RANDOM_SIZE,) * 3, generator=generator)
        weights -= weights.mean(dim=(2, 3, 4), keepdim=True)
        weights *= (2 / (num_in * _RANDOM_SIZE**3)) ** 0.5
        layers.append((weights, torch.zeros(num_out)))
    return FeatureNetwork(_frozen(convolution_network(layers)), None, (), "random filters")


# The stamps are part of the cache's key, so a file that was written again is read again.
@lru_cache(maxsize=2)
def _read(file: Path, linear: Path | None, _stamps: tuple[tuple[int, int] | None, ...]) -> FeatureNetwork:
    """Read a file of weights and build the frozen network that the names and shapes of its tensors identify.
    For a network of LPIPS, also read the linear layers.

    Args:
        file: the file of the network.
        linear: the file of the linear layers; None to look in the network's file and beside it.

    Raises:
        DataError: the file belongs to no known network, or to one that takes no linear layers.
    """
    weights = read_weights(file, "perceptual_network")
    if weights and all(_CONVOLUTION.fullmatch(name) for name in weights):
        _refuse_unused(linear, "it has 3D convolutions of its own")
        layers = convolutions(file, weights, num_dims=3)
        words = f"{len(layers)} 3D convolutions from {file}"
        return FeatureNetwork(_frozen(convolution_network(layers)), None, (), words)
    weights = {_module_name(name): value for name, value in weights.items()}
    features = {n: t for n, t in weights.items() if not n.startswith(_UNUSED_PREFIXES)}
    architecture, module = _recognise(file, weights, features)
    if architecture.kind == "medicalnet":
        _refuse_unused(linear, f"it is of {architecture.title}")
        return FeatureNetwork(module, architecture, (), f"{architecture.title} from {file}")
    source, linear_layers = _linear_layers(file, linear, weights, architecture)
    words = f"{architecture.title} from {file} with LPIPS's linear layers from {source}"
    return FeatureNetwork(module, architecture, linear_layers, words)


def _module_name(name: str) -> str:
    """Return the name of a tensor in the networks of this module, from that in a file of LPIPS or
    MedicalNet."""
    if match := _LPIPS_CONVOLUTION.fullmatch(name):
        return f"features.{match[1]}"
    return f"resnet.{name}" if name.startswith(("conv1.", "bn1.", "layer")) else name


def _recognise(
    file: Path, weights: Mapping[str, Tensor], features: Mapping[str, Tensor]
) -> tuple[Architecture, nn.Module]:
    """Find the architecture that shares the most tensors with a file, by name and shape; return it and a
    frozen network with the file's weights.

    Args:
        file: the file, for messages.
        weights: all tensors of the file, by name.
        features: the tensors without those of a classifier and of LPIPS's linear layers.

    Raises:
        DataError: no architecture shares a tensor, or tensors are missing, have other shapes or are not
            finite.
    """
    candidates = []
    for architecture in ARCHITECTURES:
        # On the device 'meta' tensors have shapes and no values, so a network is built without taking memory.
        with torch.device("meta"):
            expected = architecture.build().state_dict()
        num_shared = sum(
            name in features and features[name].shape == tensor.shape for name, tensor in expected.items()
        )
        candidates.append((num_shared, architecture, expected))
    num_shared, architecture, expected = max(candidates, key=itemgetter(0))
    if not num_shared:
        if any(map(_LINEAR.fullmatch, weights)):
            raise DataError(
                f"{file}: these are LPIPS's linear layers without the network. Name the file as perceptual_linear, and "
                "torchvision's file of the network as perceptual_network"
            )
        titles = ", ".join(architecture.title for architecture in ARCHITECTURES)
        few = ", ".join(sorted(weights)[:4]) or "no tensors"
        raise DataError(
            f"{file}: is of no network that is known here ({titles}, or 3D convolutions 0.weight, 0.bias, ...). It has "
            f"{few}"
        )
    # Files from old versions of torch lack BatchNorm's counters, which are not used.
    needed = {n: t for n, t in expected.items() if n in features or not n.endswith("num_batches_tracked")}
    if problems := list(misfits(features, needed)):
        # The file's names lack the prefix.
        listing = listed(problems).replace("resnet.", "")
        raise DataError(f"{file}: looks like {architecture.title}, but does not fit: {listing}")
    _refuse_nonfinite(file, features)
    # Building draws random weights, which must not change the random numbers of the run.
    with torch.random.fork_rng(devices=[]):
        module = architecture.build()
    module.load_state_dict(dict(features), strict=False)
    return architecture, _frozen(module)


def _linear_layers(
    file: Path, linear: Path | None, weights: Mapping[str, Tensor], architecture: Architecture
) -> tuple[Path, tuple[Tensor, ...]]:
    """Read LPIPS's linear layers from the file of the setting, else from the network's own file, else from
    one beside it.

    Args:
        file: the file of the network.
        linear: the setting perceptual_linear; None if it was left out.
        weights: the tensors of the network's file, by name.
        architecture: the network.

    Returns:
        The file, and the weights of the layers, (1, C, 1, 1) each.

    Raises:
        DataError: layers are missing, have other shapes than the network's features, or are not finite.
    """
    beside = [file.with_name(architecture.linear_file + suffix) for suffix in _SUFFIXES]
    if linear is not None:
        source, weights = linear, read_weights(linear, "perceptual_linear")
    elif any(map(_LINEAR.fullmatch, weights)):
        source = file
    elif existing := [path for path in beside if path.is_file()]:
        source, weights = existing[0], read_weights(existing[0], "perceptual_linear")
    else:
        source, weights = file, {}
    layers = {f"lin{match[1]}": t for name, t in weights.items() if (match := _LINEAR.fullmatch(name))}
    shapes = {f"lin{i}": (1, number, 1, 1) for i, number in enumerate(architecture.tapped_channels)}
    problems = [
        f"lin{i}.model.1.weight {shape}"
        + (f", and has {tuple(layers[name].shape)}" if name in layers else "")
        for i, (name, shape) in enumerate(shapes.items())
        if name not in layers or layers[name].shape != shape
    ]
    if problems:
        names = ", ".join(path.name for path in beside)
        none_beside = f", and there is none of {names} beside it" if source == file else ""
        raise DataError(
            f"{source}: LPIPS's linear layers for {architecture.title} are needed{none_beside}: {'; '.join(problems)}. Name "
            f"LPIPS's file {beside[0].name} as perceptual_linear"
        )
    if more := sorted(layers.keys() - shapes.keys()):
        raise DataError(f"{source}: has {', '.join(more)}, which {architecture.title} has not")
    _refuse_nonfinite(source, layers)
    return source, tuple(layers[name].float() for name in shapes)


def _refuse_unused(linear: Path | None, reason: str) -> None:
    """Raise DataError if the setting perceptual_linear is given for a network that does not use it."""
    if linear is not None:
        raise DataError(
            f"{linear}: perceptual_linear is for networks of LPIPS, and {reason}: leave perceptual_linear out"
        )


def _refuse_nonfinite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    if bad := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise DataError(f"{file}: has values that are NaN or infinite in {listed(bad)}")


def _frozen(module: nn.Module) -> nn.Module:
    """Return the network in float32, in evaluation mode and without gradients for its weights."""
    return module.float().requires_grad_(False).eval()
