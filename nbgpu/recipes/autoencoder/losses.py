"""The terms of an autoencoder's loss other than the reconstruction error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from nbgpu.engine.model.precision import at_least_float32
from nbgpu.errors import DataError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.feature_networks import FeatureNetwork, load_feature_network

_LPIPS_SHIFT = (-0.030, -0.088, -0.188)
_LPIPS_SCALE = (0.458, 0.448, 0.450)
"""Mean and spread of ImageNet's three colours, from -1 to 1 (Zhang et al., CVPR 2018, in their code)."""
_LPIPS_EPSILON = 1e-20
"""LPIPS adds 1e-10 to the norm. Adding its square to the squared norm gives the same values, and a finite
gradient where all features are 0."""
_MEDICALNET_EPSILON = 1e-10
"""The value that MONAI adds to the squared norm."""


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


@dataclass(frozen=True)
class _NetworkTensors:
    """The tensors of a feature network, on the device and in the precision of the images."""

    weights: dict[str, Tensor]
    linear: list[Tensor]
    shift: Tensor
    scale: Tensor


class FeatureDistance:
    """The perceptual distance of two images: the difference of their features in a frozen network, which the
    settings name.

    The network is not a part of the model: its weights get no gradient, are in no checkpoint and are not
    sharded.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        self._config = config
        self._tensors: _NetworkTensors | None = None

    @cached_property
    def network(self) -> FeatureNetwork:
        """The frozen network, on the CPU. DataError lists all problems of its files, and of settings that do
        not fit this network."""
        network = load_feature_network(self._config.perceptual_network, self._config.perceptual_linear)
        if problems := list(self._problems(network)):
            raise DataError("\n".join(problems))
        return network

    def _problems(self, network: FeatureNetwork) -> Iterator[str]:
        """Yield a message for patches that are too small for the network, and for each setting that has no
        effect with it."""
        config, architecture = self._config, network.architecture
        if architecture is not None and min(config.patch) < architecture.min_edge:
            yield (
                f"patch_size={config.patch_size} is too small for {architecture.title} (perceptual_network): at least "
                f"{architecture.min_edge}"
            )
        if architecture is None or architecture.kind != "lpips":
            for name in ("perceptual_slices", "perceptual_range"):
                if (value := getattr(config, name)) != type(config).model_fields[name].default:
                    yield (
                        f"{name}={value!r} counts only with a network of LPIPS, which takes slices, and perceptual_network is "
                        f"{network.words}: leave {name} out"
                    )

    def __call__(self, output: Tensor, image: Tensor) -> Tensor:
        """Return the distance, a scalar.

        Args:
            output, image: (N, 1, D, H, W), with values from 0 to 1.
        """
        output, image = (at_least_float32(one) for one in (output, image))
        architecture = self.network.architecture
        if architecture is None:
            return self._feature_distance(output, image)
        if architecture.kind == "medicalnet":
            return self._medicalnet_distance(output, image)
        return self._slice_distance(output, image)

    def _both_features(self, output: Tensor, image: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (features of the output, features of the image) for each layer of the network, in float32 or
        float64. Only those of the output have a gradient."""
        module, weights = self.network.module, self._tensors_like(output).weights
        # The module stays on the CPU: `functional_call` runs it with the copies of its weights.
        with torch.no_grad():
            image_features = functional_call(module, weights, (image,))
        output_features = functional_call(module, weights, (output,))
        return [
            (at_least_float32(one), at_least_float32(other))
            for one, other in zip(output_features, image_features, strict=True)
        ]

    def _tensors_like(self, images: Tensor) -> _NetworkTensors:
        """Return the network's tensors on the device of the images and in their precision. The copies are
        kept for the next step."""
        tensors = self._tensors
        if tensors is None or (tensors.shift.device, tensors.shift.dtype) != (images.device, images.dtype):

            def place(tensor: Tensor) -> Tensor:
                return tensor.to(images.device, images.dtype if tensor.is_floating_point() else None)

            tensors = self._tensors = _NetworkTensors(
                {name: place(tensor) for name, tensor in self.network.module.state_dict().items()},
                [place(weights) for weights in self.network.linear],
                *(place(torch.tensor(v).reshape(1, 3, 1, 1)) for v in (_LPIPS_SHIFT, _LPIPS_SCALE)),
            )
        return tensors

    def _feature_distance(self, output: Tensor, image: Tensor) -> Tensor:
        """Return the mean squared difference of the features (Johnson et al., ECCV 2016), averaged over the
        layers."""
        first_weight = next(self.network.module.parameters())
        # A grey volume is repeated for a network with several input channels.
        output, image = (one.expand(-1, first_weight.shape[1], -1, -1, -1) for one in (output, image))
        distances = [functional.mse_loss(*features) for features in self._both_features(output, image)]
        return torch.stack(distances).mean()

    def _medicalnet_distance(self, output: Tensor, image: Tensor) -> Tensor:
        """Return the squared difference of MedicalNet's features, a scalar. At each voxel the features are
        scaled to norm 1 over the channels; the squares are summed over channels and averaged over voxels, as
        in MONAI's PerceptualLoss."""
        # MedicalNet was trained on images with mean 0 and variance 1. An empty patch has variance 0.
        output, image = ((one - one.mean()) / one.std().clamp_min(1e-6) for one in (output, image))
        [both] = self._both_features(output, image)
        return _squared_differences(*both, _MEDICALNET_EPSILON).sum(dim=1).mean()

    def _slice_distance(self, output: Tensor, image: Tensor) -> Tensor:
        """Return LPIPS of 2D slices across each axis of volumes (N, 1, D, H, W), averaged over the slices and
        summed over the three axes, a scalar, as MONAI's PerceptualLoss does with is_fake_3d. Each call
        samples a random share of the slices."""
        total = output.new_zeros(())
        for axis in (2, 3, 4):
            # All slices across this axis, of all volumes: (N * length, 1, height, width).
            slices = [one.movedim(axis, 1).flatten(0, 2)[:, None] for one in (output, image)]
            num_slices = len(slices[0])
            num_taken = max(1, int(num_slices * self._config.perceptual_slices))
            taken = torch.randperm(num_slices, device=output.device)[:num_taken]
            total = total + self._lpips(*(one.index_select(0, taken) for one in slices))
        return total

    def _lpips(self, output: Tensor, image: Tensor) -> Tensor:
        """Return LPIPS (Zhang et al., CVPR 2018) of grey pictures (N, 1, H, W), averaged over the pictures, a
        scalar."""
        tensors = self._tensors_like(output)
        if self._config.perceptual_range == "symmetric":
            output, image = 2 * output - 1, 2 * image - 1
        # The shift has a value for each of ImageNet's three colours, so broadcasting repeats the grey
        # channel.
        output, image = ((one - tensors.shift) / tensors.scale for one in (output, image))
        distance = output.new_zeros(())
        for features, linear in zip(self._both_features(output, image), tensors.linear, strict=True):
            squares = _squared_differences(*features, _LPIPS_EPSILON)
            distance = distance + (squares * linear).sum(dim=1).mean()
        return distance


def _squared_differences(one: Tensor, other: Tensor, epsilon: float) -> Tensor:
    """Scale the features (N, C, ...) at each place to norm 1 over the channels, and return their squared
    differences in the same shape."""
    one, other = (
        features / (features.square().sum(dim=1, keepdim=True) + epsilon).sqrt() for features in (one, other)
    )
    return (one - other).square()


def kl_divergence(mean: Tensor, sigma: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from the standard normal distribution, summed over a sample's
    latents and averaged over the batch, a scalar (Kingma & Welling 2014, appendix B).

    Args:
        mean, sigma: mean and standard deviation of the latent values, (N, C, ...).
    """
    mean, variance = at_least_float32(mean), at_least_float32(sigma).square()
    return 0.5 * (mean.square() + variance - variance.log() - 1).flatten(1).sum(dim=1).mean()


def generator_loss(logits: Tensor) -> Tensor:
    """Return the generator's least-squares loss (Mao et al., ICCV 2017), a scalar: the mean of (logit - 1)^2,
    where 1 is the discriminator's target for real images."""
    return (at_least_float32(logits) - 1).square().mean()


def discriminator_loss(reconstruction_logits: Tensor, image_logits: Tensor) -> Tensor:
    """Return the discriminator's least-squares loss, a scalar: the target logits are 0 for reconstructions
    and 1 for images."""
    return (at_least_float32(reconstruction_logits).square().mean() + generator_loss(image_logits)) / 2
