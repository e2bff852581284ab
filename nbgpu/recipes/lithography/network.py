"""A network from mask to aerial image in the form that optics gives: a sum of squared convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from nbgpu.engine.model.precision import at_least_float32

_FIRST_SIGMA = 1 / 14
_OTHER_SIGMA = 1 / 10
"""Standard deviations of the Gaussians that initialise the kernels, as a share of the kernel size."""
_OTHER_NORM = 0.03
"""The L2 norm of all kernels but the first at the start."""
_CHANNELS = 16
"""The number of channels of the corrections."""


class AerialNetwork(nn.Module):
    """A sum of squares of learned convolutions, with a few dilated convolutions as a correction where images
    are no such sum.

    A partially coherent image is a sum of coherent ones, |mask * kernel|^2 (SOCS), so two real kernels here
    can represent one complex SOCS kernel. The corrections start at zero. All convolutions are circular and
    none has a stride: a mask shifted by any number of pixels gives the same image, shifted.

    Args:
        num_kernels: the number of real kernels.
        kernel_size: the width of the kernels in pixels, odd.
        corrections: the number of dilated 3 x 3 convolutions that correct the sum, with dilations 1, 2, 4
            ...; 0 for none.
    """

    def __init__(self, num_kernels: int, kernel_size: int, corrections: int = 0) -> None:
        super().__init__()
        self.kernels = CircularKernels(num_kernels, kernel_size)
        self.corrections = Corrections(num_kernels + 1, _CHANNELS, corrections) if corrections else None

    def forward(self, mask: Tensor) -> Tensor:
        """Return the images (N, 1, H, W) of the masks (N, 1, H, W), which have at least `kernel_size` pixels
        along each axis."""
        fields: Tensor = self.kernels(mask)
        image = fields.square().sum(dim=1, keepdim=True)
        if self.corrections is None:
            return image
        correction: Tensor = self.corrections(torch.cat([fields, image], dim=1))
        return image + correction


class CircularKernels(nn.Module):
    """Convolutions of one channel with large kernels, computed by FFT.

    Args:
        num_kernels: the number of kernels K.
        kernel_size: their size in pixels, an odd number.
    """

    def __init__(self, num_kernels: int, kernel_size: int) -> None:
        """Initialise the kernels (K, size, size): one Gaussian blur, and windowed noise of a small norm."""
        super().__init__()
        offsets = torch.arange(kernel_size) - kernel_size // 2
        squared_distance = (offsets[:, None].square() + offsets[None, :].square()).float()
        sigmas = torch.full((num_kernels, 1, 1), _OTHER_SIGMA * kernel_size)
        sigmas[0] = _FIRST_SIGMA * kernel_size
        kernels = torch.exp(-squared_distance / (2 * sigmas.square()))
        # The first kernel is a Gaussian blur whose values add up to 1, so that a clear mask gives the
        # intensity 1. The others are noise in a Gaussian window with a small L2 norm: they differ, so that
        # they learn different things, and change the image little at first.
        kernels[1:] *= torch.randn(num_kernels - 1, kernel_size, kernel_size)
        kernels /= kernels.square().sum(dim=(1, 2), keepdim=True).sqrt()
        kernels[0] /= kernels[0].sum()
        kernels[1:] *= _OTHER_NORM
        self.weight = nn.Parameter(kernels)

    def forward(self, mask: Tensor) -> Tensor:
        """Return the convolutions (N, K, H, W) of the masks (N, 1, H, W).

        They are in float32 or float64 even under autocast, because FFTs do not support 16-bit types.
        """
        height, width = mask.shape[-2:]
        size = self.weight.shape[-1]
        kernels = pad(at_least_float32(self.weight), (0, width - size, 0, height - size))
        # The middle of each kernel has to be at (0, 0): otherwise the convolution would shift the image.
        centred = kernels.roll((-(size // 2), -(size // 2)), dims=(1, 2))
        spectrum = torch.fft.rfft2(at_least_float32(mask)) * torch.fft.rfft2(centred)
        fields: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
        return fields


class Corrections(nn.Module):
    """Residual dilated convolutions whose output is initially zero: (N, C, H, W) -> (N, 1, H, W)."""

    def __init__(self, in_channels: int, channels: int, depth: int) -> None:
        """Build `depth` residual 3 x 3 convolutions with dilations 1, 2, 4, ..., between two 1 x 1
        convolutions."""
        super().__init__()
        self.first = nn.Conv2d(in_channels, channels, 1)
        self.steps = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=2**i, dilation=2**i, padding_mode="circular")
            for i in range(depth)
        )
        self.last = nn.Conv2d(channels, 1, 1)
        # The network begins as a pure sum of squares; the gradient of the last layer is not 0.
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return one channel, to be added to the image."""
        hidden: Tensor = self.first(features)
        for step in self.steps:
            hidden = hidden + gelu(step(hidden))
        correction: Tensor = self.last(hidden)
        return correction
