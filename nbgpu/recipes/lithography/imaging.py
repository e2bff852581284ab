"""Partially coherent imaging: the aerial image of a mask as a sum over coherent systems.

Abbe: each source point is a coherent system, whose amplitude is the mask's spectrum times the pupil, shifted
by the direction of the light; the intensities add up (Born & Wolf, Principles of Optics, 10.5; Wong, Optical
Imaging in Projection Microlithography, 2005). SOCS: the same sum in another basis, the eigenvectors of
Hopkins's transmission cross coefficients; a few of them carry most of the energy (Cobb 1998).

Fields are computed on the coarsest grid that holds the whole spectrum of the image, 4 NA / wavelength wide,
and the image is resampled on the mask's grid by its Fourier series. That is exact and costs the same for all
pixel sizes.
"""

from __future__ import annotations

import math

import torch
from scipy.fft import next_fast_len
from torch import Tensor

from nbgpu.errors import ConfigError
from nbgpu.recipes.lithography.pupil import Optics

_MAX_VALUES_AT_ONCE = 2**22


class Imager:
    """Computes aerial images of masks, differentiably in the mask and, with Abbe's systems, in the parameters
    of the lens.

    Args:
        systems: the transfer function of each coherent system at the frequencies of the coarse grid, in the
            order of torch.fft.fftfreq: (S, h, w), complex64 or complex128, which sets the precision of the
            computation. The systems are scaled so that a clear mask gives 1.
        shape: the shape of the masks, (H, W).
        energy: the share of the energy of all systems that these systems carry.
    """

    def __init__(self, systems: Tensor, shape: tuple[int, int], energy: float = 1.0) -> None:
        # The spectrum of a clear mask has the frequency 0 alone.
        clear_field = systems[:, 0, 0].abs().square().sum()
        self.systems = systems / clear_field.sqrt()
        self.shape = shape
        self.energy = energy

    def to(self, target: torch.device | torch.dtype) -> Imager:
        """Return the same imager on another device or in another precision."""
        return Imager(self.systems.to(target), self.shape, self.energy)

    def __call__(self, mask: Tensor) -> Tensor:
        """Return the intensity (..., H, W) for the real or complex amplitude transmission (..., H, W) of a
        mask; a clear mask has intensity 1."""
        assert tuple(mask.shape[-2:]) == self.shape, f"made for {self.shape}, got {tuple(mask.shape)}"
        masks = mask.to(self.systems.dtype).reshape(-1, *self.shape)
        h, w = self.systems.shape[1:]
        spectrum = _crop(torch.fft.fft2(masks, norm="forward"), h, w)
        at_once = max(1, _MAX_VALUES_AT_ONCE // (h * w * max(1, len(masks))))
        intensity = torch.zeros(len(masks), h, w, dtype=self.systems.real.dtype, device=masks.device)
        for systems in self.systems.split(at_once):
            fields = torch.fft.ifft2(spectrum[:, None] * systems, norm="forward")
            intensity = intensity + (fields.real.square() + fields.imag.square()).sum(dim=1)
        return refined(intensity, *self.shape).view(mask.shape)


def abbe(
    optics: Optics,
    points: Tensor,
    shape: tuple[int, int],
    pixel_nm: float,
    dtype: torch.dtype = torch.complex128,
    weights: Tensor | None = None,
) -> Imager:
    """Return an imager with one coherent system for each source point.

    Args:
        optics: the lens.
        points: the source points (S, 2), sigma_x and sigma_y; see `Source.points`.
        shape: the size of the masks in pixels, (H, W); masks are periodic.
        pixel_nm: the width of a pixel at the wafer.
        dtype: complex64 or complex128. Pupils are computed in double precision in both cases.
        weights: the weights of the points, (S,); equal by default.

    Raises:
        ConfigError: the pixels are too large to hold the spectrum of the image.
    """
    limit_nm = 1 / (4 * optics.cutoff_per_nm)
    if pixel_nm > limit_nm:
        raise ConfigError(
            f"pixel_nm={pixel_nm:g} is too large for NA {optics.na:g} at {optics.wavelength_nm:g} nm: an image needs "
            f"wavelength / (4 NA) = {limit_nm:.1f} nm or less"
        )
    # In units of NA / wavelength: the pupils are shifted by up to the largest sigma and reach 1 further, and
    # the image, a product of two amplitudes, has frequencies up to 2.
    reach = 1 + max(1.0, float(points.norm(dim=1).max()))
    num_points = [_coarse(pixels, pixels * pixel_nm * reach * optics.cutoff_per_nm) for pixels in shape]
    fy, fx = (
        torch.fft.fftfreq(n, d=1 / n, dtype=torch.float64, device=points.device) / (pixels * pixel_nm)
        for n, pixels in zip(num_points, shape, strict=True)
    )
    shift = points.double() * optics.cutoff_per_nm
    systems = optics.pupil(
        fx[None, None, :] + shift[:, 0, None, None], fy[None, :, None] + shift[:, 1, None, None]
    )
    if weights is None:
        weights = torch.full((len(points),), 1 / len(points), dtype=torch.float64, device=points.device)
    return Imager((systems * weights.double().sqrt()[:, None, None]).to(dtype), shape)


@torch.no_grad()
def socs(imager: Imager, num_kernels: int | None = None) -> Imager:
    """Return an imager that forms nearly the same image from fewer systems, the SOCS kernels: the
    eigenvectors of the transmission cross coefficients with the most energy. All of them form the same image.

    With the systems as the rows of R, the coefficients are R^T R*, and R R^H, which has one row per source
    point, has the same eigenvalues. Its eigenvectors U turn the rows into U^H R, whose intensities add up to
    the same sum. The result's `energy` is the share of the eigenvalues that was kept. A clear mask gives 1
    with any number of kernels.

    Args:
        imager: an imager from `abbe`, in complex128 for full accuracy.
        num_kernels: the number of kernels to keep; by default all, as many as there are source points.
    """
    rows = imager.systems.to(torch.complex128).flatten(1)
    energies, vectors = torch.linalg.eigh(rows @ rows.mH)  # in ascending order
    kept = min(num_kernels or len(rows), len(rows))
    kernels = (vectors.mH @ rows)[-kept:].flip(0).view(-1, *imager.systems.shape[1:])
    share = float(energies[-kept:].sum() / energies.sum())
    return Imager(kernels.to(imager.systems.dtype), imager.shape, share)


def _coarse(num_pixels: int, highest: float) -> int:
    """Return the number of points of a grid along an axis that holds all frequencies up to `highest` periods
    per field: a number that an FFT computes fast, and at most `num_pixels`."""
    needed: int = next_fast_len(2 * math.floor(highest + 1e-9) + 1)
    return min(num_pixels, needed)


def _places(n: int, num_pixels: int) -> Tensor:
    """Return the index, in the FFT of `num_pixels` points, of each frequency of an FFT of n points."""
    places: Tensor = torch.fft.fftfreq(n, d=1 / n).round().long() % num_pixels
    return places


def _crop(spectrum: Tensor, h: int, w: int) -> Tensor:
    """Return the h x w lowest frequencies of spectra (..., H, W), in the order of torch.fft.fftfreq."""
    rows, columns = _places(h, spectrum.shape[-2]), _places(w, spectrum.shape[-1])
    return spectrum[..., rows[:, None], columns]


def refined(image: Tensor, height: int, width: int) -> Tensor:
    """Interpolate periodic images (..., h, w) by their Fourier series on a finer grid, (..., height, width);
    the first points of both grids are the same."""
    h, w = image.shape[-2:]
    if (h, w) == (height, width):
        return image
    spectrum = torch.fft.fft2(image, norm="forward")
    fine: Tensor = spectrum.new_zeros(*image.shape[:-2], height, width)
    fine[..., _places(h, height)[:, None], _places(w, width)] = spectrum
    values: Tensor = torch.fft.ifft2(fine, norm="forward").real
    return values
