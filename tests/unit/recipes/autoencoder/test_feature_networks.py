"""The networks of the perceptual distance: files at the published shapes, and the distances computed in
another way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.losses import perceptual as monai
from torch import Tensor, nn
from torch.nn import functional as F

from nbgpu.config import train_config
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.dry_run.steps import without_exchange
from nbgpu.engine.workload.by_name import load
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.feature_networks import ARCHITECTURES
from nbgpu.recipes.autoencoder.losses import FeatureDistance
from nbgpu.recipes.autoencoder.recipe import Autoencoder

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, Tensor]

# ---- the published files ----


def _convolutions(**layers: tuple[int, ...]) -> Shapes:
    shapes: Shapes = {}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _features(layers: dict[int | str, tuple[int, int, int]]) -> Shapes:
    return _convolutions(**{f"features.{i}": (out, n, k, k) for i, (out, n, k) in layers.items()})


def _squeezenet() -> Shapes:
    layers: dict[int | str, tuple[int, int, int]] = {0: (64, 3, 3)}
    fires = {3: (64, 16, 64), 4: (128, 16, 64), 6: (128, 32, 128), 7: (256, 32, 128)}
    fires |= {9: (256, 48, 192), 10: (384, 48, 192), 11: (384, 64, 256), 12: (512, 64, 256)}
    for place, (num_in, squeezed, expanded) in fires.items():
        layers[f"{place}.squeeze"] = (squeezed, num_in, 1)
        layers[f"{place}.expand1x1"] = (expanded, squeezed, 1)
        layers[f"{place}.expand3x3"] = (expanded, squeezed, 3)
    return _features(layers)


_VGG_PLACES = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
_VGG_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)

FEATURES: dict[str, Shapes] = {
    "AlexNet": _features(
        {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
    ),
    "VGG16": _features({p: (_VGG_CHANNELS[i + 1], _VGG_CHANNELS[i], 3) for i, p in enumerate(_VGG_PLACES)}),
    "SqueezeNet 1.1": _squeezenet(),
}
CLASSIFIERS: dict[str, Shapes] = {
    "AlexNet": _convolutions(
        **{"classifier.1": (4096, 9216), "classifier.4": (4096, 4096), "classifier.6": (1000, 4096)}
    ),
    "VGG16": _convolutions(
        **{"classifier.0": (4096, 25088), "classifier.3": (4096, 4096), "classifier.6": (1000, 4096)}
    ),
    "SqueezeNet 1.1": _convolutions(**{"classifier.1": (1000, 512, 1, 1)}),
}
LINEAR = {
    "AlexNet": ("alex.pth", (64, 192, 384, 256, 256)),
    "VGG16": ("vgg.pth", (64, 128, 256, 512, 512)),
    "SqueezeNet 1.1": ("squeeze.pth", (64, 128, 256, 384, 384, 512, 512)),
}
PUBLISHED_NUM_PARAMETERS = {"AlexNet": 61_100_840, "VGG16": 138_357_544, "SqueezeNet 1.1": 1_235_496}
"""What torchvision's documentation says of the whole networks."""
PUBLISHED_MILLIONS = {"MedicalNet's ResNet-10": 14.36, "MedicalNet's ResNet-50": 46.21}
"""What MedicalNet's README says, with BatchNorm's statistics."""
NUM_BLOCKS = {"MedicalNet's ResNet-10": (1, 1, 1, 1), "MedicalNet's ResNet-50": (3, 4, 6, 3)}


def _resnet_shapes(title: str) -> Shapes:
    """The names and shapes of MedicalNet's file, as its own code makes them."""
    shapes: Shapes = {"conv1.weight": (64, 1, 7, 7, 7)}

    def norm(name: str, channels: int) -> None:
        shapes.update({f"{name}.{n}": (channels,) for n in ("weight", "bias", "running_mean", "running_var")})

    norm("bn1", 64)
    num_in, bottleneck = 64, title.endswith("50")
    for stage, num_blocks in enumerate(NUM_BLOCKS[title]):
        planes = 64 * 2**stage
        num_out = planes * 4 if bottleneck else planes
        for index in range(num_blocks):
            block = f"layer{stage + 1}.{index}"
            sizes = [(planes, num_in, 1), (planes, planes, 3), (num_out, planes, 1)]
            if not bottleneck:
                sizes = [(planes, num_in, 3), (planes, planes, 3)]
            for number, (out, given, k) in enumerate(sizes, start=1):
                shapes[f"{block}.conv{number}.weight"] = (out, given, k, k, k)
                norm(f"{block}.bn{number}", out)
            if index == 0 and num_in != num_out:
                shapes[f"{block}.downsample.0.weight"] = (num_out, num_in, 1, 1, 1)
                norm(f"{block}.downsample.1", num_out)
            num_in = num_out
    return shapes


def _random(shapes: Shapes, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        fan_in = max(1, torch.Size(shape[1:]).numel())
        weights[name] = torch.randn(shape, generator=generator) * (2 / fan_in) ** 0.5
        if name.endswith("running_var"):
            weights[name] = weights[name].abs() + 0.5
    return weights


def _save_lpips(folder: Path, title: str) -> tuple[Path, Weights, list[Tensor]]:
    """Write torchvision's and LPIPS's files; the classifier, which is not used, is a small one."""
    weights = _random(FEATURES[title])
    file = folder / "network.pth"
    torch.save({**weights, "classifier.1.weight": torch.zeros(2, 2)}, file)
    name, channels = LINEAR[title]
    linear = [torch.rand(1, n, 1, 1, generator=torch.Generator().manual_seed(n)) for n in channels]
    torch.save({f"lin{i}.model.1.weight": w for i, w in enumerate(linear)}, folder / name)
    return file, weights, linear


def _save_medicalnet(folder: Path, title: str) -> tuple[Path, Weights]:
    weights = _random(_resnet_shapes(title))
    file = folder / "resnet.pth"
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, file)
    return file, weights


# ---- the same features, computed in another way ----


def _relu_conv(weights: Weights, x: Tensor, name: str, **how: int) -> Tensor:
    return F.relu(F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], **how))


def _alexnet_features(w: Weights, x: Tensor) -> Iterator[Tensor]:
    yield (x := _relu_conv(w, x, "features.0", stride=4, padding=2))
    yield (x := _relu_conv(w, F.max_pool2d(x, 3, 2), "features.3", padding=2))
    yield (x := _relu_conv(w, F.max_pool2d(x, 3, 2), "features.6", padding=1))
    yield (x := _relu_conv(w, x, "features.8", padding=1))
    yield _relu_conv(w, x, "features.10", padding=1)


def _vgg16_features(w: Weights, x: Tensor) -> Iterator[Tensor]:
    for number, places in enumerate([(0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)]):
        x = F.max_pool2d(x, 2) if number else x
        for place in places:
            x = _relu_conv(w, x, f"features.{place}", padding=1)
        yield x


def _squeezenet_features(w: Weights, x: Tensor) -> Iterator[Tensor]:
    def fire(x: Tensor, place: int) -> Tensor:
        name = f"features.{place}"
        x = _relu_conv(w, x, f"{name}.squeeze")
        sides = _relu_conv(w, x, f"{name}.expand1x1"), _relu_conv(w, x, f"{name}.expand3x3", padding=1)
        return torch.cat(sides, 1)

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, ceil_mode=True)

    yield (x := _relu_conv(w, x, "features.0", stride=2))
    yield (x := fire(fire(pool(x), 3), 4))
    yield (x := fire(fire(pool(x), 6), 7))
    yield (x := fire(pool(x), 9))
    for place in (10, 11, 12):
        yield (x := fire(x, place))


FEATURES_OF: dict[str, Callable[[Weights, Tensor], Iterator[Tensor]]] = {
    "AlexNet": _alexnet_features,
    "VGG16": _vgg16_features,
    "SqueezeNet 1.1": _squeezenet_features,
}


class Lpips(nn.Module):
    """Zhang et al. (CVPR 2018), equation 1, with the input scaling of their code."""

    def __init__(self, title: str, weights: Weights, linear: list[Tensor]) -> None:
        super().__init__()
        self.title, self.weights, self.linear = title, weights, linear

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        shift = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
        scale = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
        features = [[*FEATURES_OF[self.title](self.weights, (x - shift) / scale)] for x in (one, other)]
        total = torch.zeros(len(one))
        for a, b, weight in zip(*features, self.linear, strict=True):
            a, b = (x / (x.norm(dim=1, keepdim=True) + 1e-10) for x in (a, b))
            total = total + F.conv2d((a - b) ** 2, weight).mean(dim=(1, 2, 3))
        return total


class PlainMedicalNet(nn.Module):
    """MedicalNet's ResNet as its paper has it: the last two stages dilated, without striding."""

    def __init__(self, title: str, weights: Weights) -> None:
        super().__init__()
        self.title, self.weights = title, weights

    def _norm(self, x: Tensor, name: str) -> Tensor:
        w = self.weights
        return F.batch_norm(x, *(w[f"{name}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        x = F.relu(self._norm(F.conv3d(x, w["conv1.weight"], stride=2, padding=3), "bn1"))
        x = F.max_pool3d(x, 3, 2, 1)
        for stage, (stride, dilation) in enumerate([(1, 1), (2, 1), (1, 2), (1, 4)], start=1):
            for index in range(NUM_BLOCKS[self.title][stage - 1]):
                x = self._block(x, f"layer{stage}.{index}", 1 if index else stride, dilation)
        return x

    def _block(self, x: Tensor, name: str, stride: int, dilation: int) -> Tensor:
        w = self.weights
        shortcut = x
        if f"{name}.downsample.0.weight" in w:
            shortcut = self._norm(
                F.conv3d(x, w[f"{name}.downsample.0.weight"], stride=stride), f"{name}.downsample.1"
            )
        strided = 2 if f"{name}.conv3.weight" in w else 1
        for number in (1, 2, 3):
            weight = w.get(f"{name}.conv{number}.weight")
            if weight is None:
                break
            wide = {"padding": dilation, "dilation": dilation} if weight.shape[2] == 3 else {}
            x = F.conv3d(x, weight, stride=stride if number == strided else 1, **wide)
            x = self._norm(x, f"{name}.bn{number}")
            if f"{name}.conv{number + 1}.weight" in w:
                x = F.relu(x)
        return F.relu(x + shortcut)


def _config(file: Path, **values: Any) -> AutoencoderConfig:
    values = {"patch_size": 32} | values
    config = train_config(
        "autoencoder", data="phantoms", perceptual="features", perceptual_network=str(file), **values
    )
    assert isinstance(config, AutoencoderConfig)
    return config


def _pair(edge: int) -> tuple[Tensor, Tensor]:
    """Two batches of patches that are longer along each next axis."""
    torch.manual_seed(1)
    shape = (2, 1, edge, edge + 1, edge + 3)
    return torch.rand(shape), torch.rand(shape)


# ---- tests ----


@pytest.mark.parametrize("title", PUBLISHED_NUM_PARAMETERS)
def test_the_published_numbers_of_parameters(title: str) -> None:
    architecture = next(each for each in ARCHITECTURES if each.title == title)
    own = {name: tuple(value.shape) for name, value in architecture.build().state_dict().items()}
    assert own == FEATURES[title]
    whole = sum(torch.Size(shape).numel() for shape in (own | CLASSIFIERS[title]).values())
    assert whole == PUBLISHED_NUM_PARAMETERS[title]
    assert architecture.tapped_channels == LINEAR[title][1]


@pytest.mark.parametrize("title", PUBLISHED_MILLIONS)
def test_the_published_sizes_of_medicalnet(title: str) -> None:
    architecture = next(each for each in ARCHITECTURES if each.title == title)
    with torch.device("meta"):
        own = architecture.build().state_dict()
    counted = {
        name.removeprefix("resnet."): tuple(value.shape)
        for name, value in own.items()
        if not name.endswith("num_batches_tracked")
    }
    assert counted == _resnet_shapes(title)
    millions = sum(torch.Size(shape).numel() for shape in counted.values()) / 1e6
    assert round(millions, 2) == PUBLISHED_MILLIONS[title]


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("title", FEATURES)
def test_lpips_of_slices_is_monais(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str, share: float
) -> None:
    file, weights, linear = _save_lpips(tmp_path, title)
    monkeypatch.setattr(monai, "LPIPS", lambda **_: Lpips(title, weights, linear))
    theirs = monai.PerceptualLoss(spatial_dims=3, network_type="alex", fake_3d_ratio=share)
    output, image = _pair(32 if title == "AlexNet" else 20)
    ours = FeatureDistance(_config(file, perceptual_slices=share, perceptual_range="unit"))
    torch.manual_seed(2)
    expected = theirs(output, image)
    torch.manual_seed(2)
    torch.testing.assert_close(ours(output, image), expected, rtol=1e-4, atol=0)
    assert ours.network.words.startswith(f"{title} from {file} with LPIPS's linear layers from {tmp_path}")
    # As LPIPS defines it, images go from -1 to 1.
    torch.manual_seed(2)
    symmetric = FeatureDistance(_config(file, perceptual_slices=share))(output, image)
    torch.manual_seed(2)
    torch.testing.assert_close(symmetric, theirs(2 * output - 1, 2 * image - 1), rtol=1e-4, atol=0)
    assert float(symmetric) != pytest.approx(float(expected), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("title", PUBLISHED_MILLIONS)
def test_medicalnets_distance_is_monais(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    file, weights = _save_medicalnet(tmp_path, title)
    monkeypatch.setattr(torch.hub, "load", lambda *_, **__: PlainMedicalNet(title, weights))
    theirs = monai.MedicalNetPerceptualSimilarity()
    output, image = _pair(16)
    ours = FeatureDistance(_config(file))
    assert ours.network.words == f"{title} from {file}"
    torch.testing.assert_close(ours(output, image), theirs(output, image).mean(), rtol=1e-4, atol=0)


def test_one_file_may_have_the_whole_of_lpips(tmp_path: Path) -> None:
    file, weights, linear = _save_lpips(tmp_path, "SqueezeNet 1.1")
    whole = {
        name.replace("features.", f"net.slice{i % 7 + 1}."): value
        for i, (name, value) in enumerate(weights.items())
    }
    for i, weight in enumerate(linear):
        whole |= {f"lin{i}.model.1.weight": weight, f"lins.{i}.model.1.weight": weight}
    whole |= {"scaling_layer.shift": torch.zeros(1, 3, 1, 1), "scaling_layer.scale": torch.ones(1, 3, 1, 1)}
    (tmp_path / "whole").mkdir()
    torch.save(whole, other := tmp_path / "whole" / "lpips.pth")
    output, image = _pair(17)
    distances = [
        FeatureDistance(_config(each, patch_size=20, perceptual_slices=1.0))(output, image)
        for each in (file, other)
    ]
    torch.testing.assert_close(*distances)


@pytest.mark.slow
def test_the_network_is_frozen_and_in_no_checkpoint_and_the_model_learns_from_it(tmp_path: Path) -> None:
    file, *_ = _save_lpips(tmp_path, "SqueezeNet 1.1")
    recipe = load(_config(file, patch_size=20, perceptual_weight=2.0, perceptual_slices=0.1))
    assert isinstance(recipe, Autoencoder)
    loaders = recipe.build_loaders(0, 1)
    loaders.close()
    assert loaders.summary[-1].startswith("perceptual distance: features of SqueezeNet 1.1 from")
    model, image = recipe.build_model(), torch.rand(1, 1, 20, 20, 20)
    terms = recipe.loss(model, {"image": image})
    terms["perceptual_loss"].backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in gradients) > 0
    assert all(g.isfinite().all() for g in gradients)
    assert not any("features" in name for name in model.state_dict())
    assert recipe._feature_distance is not None
    network = recipe._feature_distance.network.module
    assert not network.training
    assert all(not p.requires_grad and p.grad is None for p in network.parameters())


def test_the_distance_is_in_the_precision_of_the_run(tmp_path: Path) -> None:
    file, *_ = _save_lpips(tmp_path, "SqueezeNet 1.1")
    output, image = (x[:, :, :20, :20, :20] for x in _pair(20))
    distance = FeatureDistance(_config(file, patch_size=20, perceptual_slices=1.0))
    plain = distance(output, image)
    double = distance(output.double(), image.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), plain, rtol=1e-4, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = distance(output, image)
    assert coarse.dtype == torch.float32
    assert 0 < abs(float(coarse) / float(plain) - 1) < 0.1


def test_equal_and_empty_images_have_a_gradient(tmp_path: Path) -> None:
    for file in (
        _save_lpips(tmp_path, "SqueezeNet 1.1")[0],
        _save_medicalnet(tmp_path, "MedicalNet's ResNet-10")[0],
    ):
        for image in (torch.zeros(1, 1, 20, 20, 20), torch.rand(1, 1, 20, 20, 20)):
            output = image.clone().requires_grad_()
            distance = FeatureDistance(_config(file, patch_size=20))(output, image)
            distance.backward()
            assert float(distance.detach()) == 0
            assert output.grad is not None
            assert output.grad.isfinite().all()


@pytest.mark.long
@pytest.mark.slow
def test_the_memory_of_a_step_counts_the_networks_activations(tmp_path: Path) -> None:
    file, *_ = _save_lpips(tmp_path, "VGG16")
    settings = {"patch_size": 16, "perceptual_weight": 0.1}
    sizes = [
        sum(fake_steps.parts(without_exchange(config), torch.device("cpu"), 1).values())
        for config in (
            train_config("autoencoder", data="phantoms", patch_size=16),
            _config(file, **settings, perceptual_slices=0.5),
            _config(file, **settings, perceptual_slices=1.0),
        )
    ]
    assert sizes == sorted(sizes)
    # Half of the slices of two patches across three axes, with 64 channels at full resolution in float32.
    assert sizes[2] - sizes[1] > 3 * 0.5 * 2 * 16**3 * 64 * 4


@pytest.mark.parametrize("title", ["AlexNet", "VGG16", "SqueezeNet 1.1"])
def test_a_patch_that_is_too_small_is_refused(tmp_path: Path, title: str) -> None:
    least = {"AlexNet": 31, "VGG16": 16, "SqueezeNet 1.1": 17}[title]
    file, weights, _ = _save_lpips(tmp_path, title)
    assert len([*FEATURES_OF[title](weights, torch.zeros(1, 3, least, least))]) == len(LINEAR[title][1])
    with pytest.raises(RuntimeError):
        [*FEATURES_OF[title](weights, torch.zeros(1, 3, least - 1, least - 1))]
    below = (32, 32, (least - 1) // 4 * 4)
    words = f"patch_size={re.escape(str(below))} is too small for {title} .*: at least {least}"
    with pytest.raises(DataError, match=words):
        load(_config(file, patch_size=below)).inspect()


def _bad_files(folder: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    _, weights, linear = _save_lpips(folder, "SqueezeNet 1.1")
    _, of_resnet = _save_medicalnet(folder, "MedicalNet's ResNet-10")
    lin = {f"lin{i}.model.1.weight": w for i, w in enumerate(linear)}
    less = {n: w for n, w in weights.items() if n != "features.12.squeeze.bias"}
    less["features.3.squeeze.weight"] = torch.zeros(16, 64, 3, 3)
    yield (
        "a layer is missing and another has another shape",
        less | lin,
        r"looks like SqueezeNet 1.1, but does not fit: has no features.12.squeeze.bias \(64,\); "
        r"features.3.squeeze.weight is \(16, 64, 3, 3\), and the network's is \(16, 64, 1, 1\)",
    )
    yield (
        "more convolutions",
        _random(FEATURES["VGG16"]) | {"features.34.weight": torch.zeros(1)},
        r"looks like VGG16, but does not fit: has features.34.weight \(1,\), which the network has not",
    )
    yield (
        "MedicalNet without its last stage",
        {n: w for n, w in of_resnet.items() if not n.startswith("layer4.0.conv2")},
        r"looks like MedicalNet's ResNet-10, but does not fit: has no layer4.0.conv2.weight \(512, 512, 3, 3, 3\)",
    )
    yield ("only the linear layers", lin, "LPIPS's linear layers without the network")
    yield (
        "another network",
        {"stem.weight": torch.zeros(1)},
        "of no network that is known here .* It has stem.weight",
    )
    yield (
        "a linear layer too few",
        weights | {n: w for n, w in lin.items() if not n.startswith("lin6")},
        r"linear layers for SqueezeNet 1.1 are needed.*: lin6.model.1.weight \(1, 512, 1, 1\)",
    )
    yield (
        "NaN",
        weights | lin | {"features.0.bias": torch.full((64,), torch.nan)},
        "values that are NaN or infinite in features.0.bias",
    )


@pytest.mark.slow
def test_files_that_do_not_fit_are_refused_with_names_and_shapes(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    for number, (_, tensors, words) in enumerate(_bad_files(tmp_path / "good")):
        torch.save(tensors, file := tmp_path / f"{number}.pth")
        with pytest.raises(DataError, match=words) as caught:
            load(_config(file)).inspect()
        assert str(file) in str(caught.value)


def test_linear_layers_that_are_not_there_are_named(tmp_path: Path) -> None:
    file, *_ = _save_lpips(tmp_path, "SqueezeNet 1.1")
    linear = tmp_path / "squeeze.pth"
    elsewhere = linear.rename(tmp_path / "linear.pth")
    with pytest.raises(DataError) as caught:
        load(_config(file)).inspect()
    message = str(caught.value)
    assert "none of squeeze.pth, squeeze.pt, squeeze.safetensors beside it" in message
    assert "lin0.model.1.weight (1, 64, 1, 1)" in message
    assert "Name LPIPS's file squeeze.pth as perceptual_linear" in message
    load(_config(file, perceptual_linear=str(elsewhere))).inspect()


@pytest.mark.slow
def test_settings_that_a_network_does_not_need_are_refused(tmp_path: Path) -> None:
    resnet, _ = _save_medicalnet(tmp_path, "MedicalNet's ResNet-10")
    with pytest.raises(DataError, match=r"perceptual_slices=0.2 counts only with a network of LPIPS"):
        load(_config(resnet, perceptual_slices=0.2)).inspect()
    with pytest.raises(DataError, match=r"perceptual_range='unit' counts only with a network of LPIPS"):
        load(_config(resnet, perceptual_range="unit")).inspect()
    with pytest.raises(DataError, match="leave perceptual_linear out"):
        load(_config(resnet, perceptual_linear=str(resnet))).inspect()
    with pytest.raises(ConfigError, match=r"perceptual_slices=0.2 counts only with perceptual_network other"):
        _config(Path("random"), perceptual_slices=0.2)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file, *_ = _save_lpips(tmp_path, "SqueezeNet 1.1")
    output, image = _pair(20)
    config = _config(file, patch_size=20, perceptual_slices=1.0)
    before = float(FeatureDistance(config)(output, image))
    torch.save({**_random(FEATURES["SqueezeNet 1.1"], seed=7), "classifier.1.bias": torch.zeros(3)}, file)
    assert float(FeatureDistance(config)(output, image)) != before
