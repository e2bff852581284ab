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
from pathlib import Path
from typing import Literal

import torch
from monai.networks.nets import resnet
from torch import Tensor, nn

from nbgpu.errors import DataError
from nbgpu.recipes.weight_files import convolutions, listed, misfits, read_weights

_VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512)
"""Channels of the convolutions up to the last features that LPIPS takes."""


_OWN_LAYER = re.compile(r"\d+\.(weight|bias)")
_OF_WHOLE_LPIPS = re.compile(r"net\.slice\d+\.(\d+\..*)")
"""What LPIPS calls the convolutions in a file of its whole network."""
_LINEAR = re.compile(r"lin(\d+)\.model\.\d+\.weight")
_BESIDE_THE_FEATURES = ("classifier.", "fc.", "lin", "scaling_layer.")
"""Prefixes of tensors in published files that the features do not need."""
_SUFFIXES = (".pth", ".pt", ".safetensors")
_RANDOM_CHANNELS = (1, 16, 32)
_RANDOM_SIZE = 3


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
        """Return the outputs of the tapped layers, in order, for images (N, C, ...)."""
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


@dataclass(frozen=True)
class FeatureNetwork:
    """A frozen network, on the CPU, with LPIPS's weights of its features."""

    module: nn.Module
    """Returns a list of features."""
    architecture: Architecture | None
    """None for random filters and convolutions of the user's own."""
    linear: tuple[Tensor, ...]
    """LPIPS's weights of each of the features, (1, C, 1, 1); empty for the other kinds."""
    words: str
    """What the network is, and which files it is from."""


def network_of(network: str, linear: str) -> FeatureNetwork:
    """Return the frozen network that the settings name.

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
    """Return (modification time in ns, size in bytes) of a file, by which a changed file is noticed; None if
    there is no file."""
    if file is None or not file.is_file():
        return None
    found = file.stat()
    return found.st_mtime_ns, found.st_size


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
    return FeatureNetwork(_frozen(own_network(layers)), None, (), "random filters")


# The stamps are part of the cache's key, so a file that was written again is read again.
@lru_cache(maxsize=2)
def _read(file: Path, linear: Path | None, _stamps: tuple[tuple[int, int] | None, ...]) -> FeatureNetwork:
    """Read a file of weights and return the frozen network that its tensors' names and shapes identify, for
    LPIPS with the linear layers that weigh its features.

    Args:
        file: the file of the network.
        linear: LPIPS's own file, or None to look in the network's file and beside it.

    Raises:
        DataError: the file belongs to no known network, or to one that takes no linear layers.
    """
    weights = read_weights(file, "perceptual_network")
    if weights and all(_OWN_LAYER.fullmatch(name) for name in weights):
        _refuse_unused(linear, "it has 3D convolutions of its own")
        module = own_network(convolutions(file, weights, num_dims=3))
        return FeatureNetwork(_frozen(module), None, (), f"{_size_of(module)} 3D convolutions from {file}")
    weights = {_name_of_features(name): value for name, value in weights.items()}
    features = {n: t for n, t in weights.items() if not n.startswith(_BESIDE_THE_FEATURES)}
    architecture, module = _recognised(file, weights, features)
    if architecture.kind == "medicalnet":
        _refuse_unused(linear, f"it is of {architecture.title}")
        return FeatureNetwork(module, architecture, (), f"{architecture.title} from {file}")
    source, layers = _linear_layers(file, linear, weights, architecture)
    words = f"{architecture.title} from {file} with LPIPS's linear layers from {source}"
    return FeatureNetwork(module, architecture, layers, words)


def _name_of_features(name: str) -> str:
    """Return the name that torchvision gives a tensor to which LPIPS or MedicalNet gives another one."""
    if found := _OF_WHOLE_LPIPS.fullmatch(name):
        return f"features.{found[1]}"
    return f"resnet.{name}" if name.startswith(("conv1.", "bn1.", "layer")) else name


def _recognised(
    file: Path, weights: Mapping[str, Tensor], features: Mapping[str, Tensor]
) -> tuple[Architecture, nn.Module]:
    """Return the architecture that shares the most tensors with a file, by name and shape, and a network with
    the file's weights.

    Args:
        file: the file, for messages.
        weights: all of its tensors, by name.
        features: those that are not of a classifier or of LPIPS's linear layers.

    Raises:
        DataError: no architecture shares a tensor, or tensors are missing, have other shapes or are not
            finite.
    """
    known = []
    for architecture in ARCHITECTURES:
        # On the device 'meta' tensors have shapes and no values, so a network is built without taking memory.
        with torch.device("meta"):
            expected = architecture.build().state_dict()
        same = sum(
            name in features and features[name].shape == tensor.shape for name, tensor in expected.items()
        )
        known.append((same, architecture, expected))
    same, architecture, expected = max(known, key=lambda each: each[0])
    if not same:
        if any(map(_LINEAR.fullmatch, weights)):
            raise DataError(
                f"{file}: these are LPIPS's linear layers without the network. Name the file as perceptual_linear, and "
                "torchvision's file of the network as perceptual_network"
            )
        titles = ", ".join(each.title for each in ARCHITECTURES)
        few = ", ".join(sorted(weights)[:4]) or "no tensors"
        raise DataError(
            f"{file}: is of no network that is known here ({titles}, or 3D convolutions 0.weight, 0.bias, ...). It has "
            f"{few}"
        )
    # Files from old versions of torch lack BatchNorm's counters, which are not used.
    needed = {n: t for n, t in expected.items() if n in features or not n.endswith("num_batches_tracked")}
    if problems := list(misfits(features, needed)):
        told = listed(problems).replace("resnet.", "")
        raise DataError(f"{file}: looks like {architecture.title}, but does not fit: {told}")
    _refuse_nonfinite(file, features)
    # Building draws random weights. The run's random numbers must not depend on this.
    with torch.random.fork_rng(devices=[]):
        module = architecture.build()
    module.load_state_dict(dict(features), strict=False)
    return architecture, _frozen(module)


def _linear_layers(
    file: Path, linear: Path | None, weights: Mapping[str, Tensor], architecture: Architecture
) -> tuple[Path, tuple[Tensor, ...]]:
    """Return (the file with LPIPS's linear layers, the layers' weights, (1, C, 1, 1) each). The file is that
    of the setting, else the network's own, else one beside it.

    Raises:
        DataError: layers are missing, have other shapes than the network's features, or are not finite.
    """
    beside = [file.with_name(architecture.linear_file + suffix) for suffix in _SUFFIXES]
    if linear is not None:
        source, weights = linear, read_weights(linear, "perceptual_linear")
    elif any(map(_LINEAR.fullmatch, weights)):
        source = file
    elif there := [one for one in beside if one.is_file()]:
        source, weights = there[0], read_weights(there[0], "perceptual_linear")
    else:
        source, weights = file, {}
    layers = {f"lin{found[1]}": t for name, t in weights.items() if (found := _LINEAR.fullmatch(name))}
    shapes = {f"lin{i}": (1, number, 1, 1) for i, number in enumerate(architecture.tapped_channels)}
    problems = [
        f"lin{i}.model.1.weight {shape}"
        + (f", and has {tuple(layers[name].shape)}" if name in layers else "")
        for i, (name, shape) in enumerate(shapes.items())
        if name not in layers or layers[name].shape != shape
    ]
    if problems:
        where = (
            ""
            if source != file
            else f", and there is none of {', '.join(one.name for one in beside)} beside it"
        )
        raise DataError(
            f"{source}: LPIPS's linear layers for {architecture.title} are needed{where}: {'; '.join(problems)}. Name "
            f"LPIPS's file {beside[0].name} as perceptual_linear"
        )
    if more := sorted(layers.keys() - shapes.keys()):
        raise DataError(f"{source}: has {', '.join(more)}, which {architecture.title} has not")
    _refuse_nonfinite(source, layers)
    return source, tuple(layers[name].float() for name in shapes)


def _refuse_unused(linear: Path | None, why: str) -> None:
    """Raise DataError if the setting perceptual_linear is given for a network that has no use for it."""
    if linear is not None:
        raise DataError(
            f"{linear}: perceptual_linear is for networks of LPIPS, and {why}: leave perceptual_linear out"
        )


def _refuse_nonfinite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    if bad := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise DataError(f"{file}: has values that are NaN or infinite in {listed(bad)}")


def _size_of(module: nn.Module) -> int:
    """Return the number of 3D convolutions in a network."""
    return sum(isinstance(layer, nn.Conv3d) for layer in module.modules())


def _frozen(module: nn.Module) -> nn.Module:
    """Return the network in float32, in evaluation mode and without gradients for its weights."""
    return module.float().requires_grad_(False).eval()
