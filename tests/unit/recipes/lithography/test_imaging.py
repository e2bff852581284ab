"""The imaging model against closed forms, and its two ways of computing against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import j1
from torch import Tensor

from nbgpu.errors import ConfigError
from nbgpu.recipes.lithography.imaging import abbe, socs
from nbgpu.recipes.lithography.pupil import Optics, zernike
from nbgpu.recipes.lithography.sources import Source
from nbgpu.recipes.lithography.symmetry import broken_by_mirrors, broken_by_quarter_turns, fringe_order

ABERRATED = Optics(na=0.85, defocus_nm=60.0, zernikes=((5, 0.03), (8, -0.05), (9, 0.04)))
SOURCES = [
    Source("conventional", sigma_outer=0.6, num_cells=9),
    Source("annular", num_cells=9),
    Source("quadrupole", num_cells=11),
    Source("quasar", num_cells=11),
    Source("dipole", angle_deg=90, num_cells=11),
]


def random_mask(*shape: int, seed: int = 0) -> Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.4).double()


def finer(mask: Tensor, times: int) -> Tensor:
    """The mask's Fourier series on a grid with so many times the points along each axis."""
    height, width = mask.shape
    spectrum = torch.zeros(times * height, times * width, dtype=torch.complex128)
    rows = torch.fft.fftfreq(height, d=1 / height).long()
    columns = torch.fft.fftfreq(width, d=1 / width).long()
    spectrum[rows[:, None], columns] = torch.fft.fft2(mask, norm="forward").to(torch.complex128)
    return torch.fft.ifft2(spectrum, norm="forward")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.shape)
def test_all_kernels_give_abbes_image_and_a_clear_mask_gives_one(source: Source) -> None:
    by_points = abbe(ABERRATED, source.points(), (32, 40), 25.0)
    by_kernels = socs(by_points)
    masks = random_mask(2, 32, 40)
    torch.testing.assert_close(by_kernels(masks), by_points(masks), rtol=0, atol=1e-10)
    clear = torch.ones(32, 40, dtype=torch.float64)
    few = socs(by_points, 5)
    for imager in (by_points, by_kernels, few):
        torch.testing.assert_close(imager(clear), clear, rtol=0, atol=1e-13)
        torch.testing.assert_close(
            imager.to(torch.complex64)(clear.float()), clear.float(), rtol=0, atol=1e-5
        )
    assert by_kernels.energy == pytest.approx(1, abs=1e-12)
    assert 0.5 < few.energy < 1
    assert len(few.systems) == 5
    errors = [float((socs(by_points, n)(masks) - by_points(masks)).abs().max()) for n in (2, 8, 20)]
    assert errors[0] > errors[1] > errors[2]


def test_the_coarse_grid_loses_nothing() -> None:
    """The same mask on finer pixels has the same image wherever both have a pixel."""
    points, mask = Source(num_cells=7).points(), random_mask(20, 24)
    fine = finer(mask, 5)
    image = abbe(ABERRATED, points, (20, 24), 50.0)(mask)
    on_fine = abbe(ABERRATED, points, (100, 120), 10.0)(fine)
    torch.testing.assert_close(on_fine[::5, ::5], image, rtol=0, atol=1e-12)


def test_coherent_light_takes_three_orders_of_a_grating() -> None:
    """On the axis: |a0 + 2 a1 e^(i phase) cos(2 pi x / period)|^2 with the grating's own discrete
    coefficients."""
    num_pixels, period, line, pixel_nm = 64, 16, 7, 20.0
    mask = torch.zeros(num_pixels, num_pixels, dtype=torch.float64)
    mask[:, torch.arange(num_pixels) % period < line] = 1
    optics = Optics(na=0.85, defocus_nm=80.0)
    assert 1 < optics.cutoff_per_nm * period * pixel_nm < 2, "orders -1, 0 and 1 pass"
    image = abbe(optics, Source("point").points(), (num_pixels, num_pixels), pixel_nm)(mask)
    x = torch.arange(num_pixels, dtype=torch.float64) - (line - 1) / 2
    a0 = line / period
    a1 = math.sin(math.pi * line / period) / (period * math.sin(math.pi / period))
    sine = optics.wavelength_nm / (period * pixel_nm)
    phase = 2 * math.pi * 80.0 / optics.wavelength_nm * (math.sqrt(1 - sine**2) - 1)
    amplitude = a0 + 2 * a1 * np.exp(1j * phase) * torch.cos(2 * math.pi * x / period).numpy()
    wanted = torch.from_numpy(np.abs(amplitude) ** 2).expand(num_pixels, -1)
    torch.testing.assert_close(image, wanted, rtol=0, atol=1e-13)


def test_the_image_of_a_pinhole_is_an_airy_disc() -> None:
    """(2 J1(v) / v)^2 with v = 2 pi NA r / wavelength, in a field so large that the pupil has 10,000
    frequencies."""
    num_pixels, pixel_nm = 256, 50.0
    mask = torch.zeros(num_pixels, num_pixels, dtype=torch.float64)
    mask[0, 0] = 1
    optics = Optics(na=0.85)
    image = abbe(optics, Source("point").points(), (num_pixels, num_pixels), pixel_nm)(mask)
    r = torch.arange(1, 14, dtype=torch.float64) * pixel_nm
    v = (2 * math.pi * optics.cutoff_per_nm * r).numpy()
    wanted = torch.from_numpy((2 * j1(v) / v) ** 2)
    torch.testing.assert_close(image[0, 1:14] / image[0, 0], wanted, rtol=0, atol=1e-3)


def test_incoherent_light_gives_the_transfer_function_of_a_circle() -> None:
    """A source that is larger than all orders of the mask: the spectrum of |mask|^2 times
    2/pi (arccos(v) - v sqrt(1 - v^2)) with v = frequency / (2 NA / wavelength)."""
    num_pixels, pixel_nm, optics = 16, 50.0, Optics(na=0.6)
    # Both in frequencies of the field; points a fifth of one apart see each pair of orders alike.
    in_pupil, reach = optics.cutoff_per_nm * num_pixels * pixel_nm, 14
    assert reach > num_pixels / 2 * math.sqrt(2) + in_pupil
    source = Source("conventional", sigma_outer=reach / in_pupil, num_cells=2 * 5 * reach)
    mask = random_mask(num_pixels, num_pixels)
    image = abbe(optics, source.points(), (num_pixels, num_pixels), pixel_nm)(mask)
    fine = finer(mask, 2).abs().square()  # the square has twice the mask's frequencies
    frequency = torch.fft.fftfreq(2 * num_pixels, d=pixel_nm / 2, dtype=torch.float64)
    v = (torch.hypot(frequency[:, None], frequency[None, :]) / (2 * optics.cutoff_per_nm)).clamp(max=1)
    passes = 2 / math.pi * (torch.acos(v) - v * torch.sqrt(1 - v.square()))
    wanted = torch.fft.ifft2(torch.fft.fft2(fine) * passes).real[::2, ::2]
    torch.testing.assert_close(image, wanted, rtol=0, atol=0.01)
    assert float(image.std()) > 0.05


def test_gradients_of_mask_defocus_aberrations_and_source() -> None:
    points = Source(num_cells=5).points()

    def image(mask: Tensor, defocus_nm: Tensor, waves: Tensor, weights: Tensor) -> Tensor:
        optics = Optics(na=0.85, defocus_nm=defocus_nm, zernikes=((7, waves),))
        return abbe(optics, points, (16, 16), 40.0, weights=weights)(mask)

    weights = torch.full((len(points),), 0.1, dtype=torch.float64, requires_grad=True)
    inputs = [random_mask(16, 16), torch.tensor(50.0), torch.tensor(0.05)]
    leaves = [value.double().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(image, (*leaves, weights), fast_mode=True)


def test_zernikes_in_fringe_order_are_orthogonal_and_reach_one_at_the_rim() -> None:
    axis = torch.linspace(-1, 1, 401, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    rho, theta = torch.hypot(x, y), torch.atan2(y, x)
    inside = rho <= 1
    basis = torch.stack([zernike(j, rho[inside], theta[inside]) for j in range(1, 37)])
    products = basis @ basis.T / inside.sum()
    assert float((products - products.diag().diag()).abs().max()) < 0.01
    assert torch.allclose(basis.abs().amax(dim=1), torch.ones(36, dtype=torch.float64), atol=0.05)
    torch.testing.assert_close(zernike(9, rho, theta), 6 * rho**4 - 6 * rho**2 + 1)
    assert [fringe_order(j) for j in (2, 3, 8, 11, 36)] == [(1, 1), (1, -1), (3, -1), (3, -3), (10, 0)]


@pytest.mark.parametrize("source", [*SOURCES, Source("dipole", angle_deg=45, num_cells=11)], ids=str)
@pytest.mark.parametrize("number", [1, 5, 6, 7, 9, 17])
def test_symmetries_are_those_of_the_image(source: Source, number: int) -> None:
    # Out of focus: in focus, a mask without phase has the same image for astigmatism of either sign.
    imager = abbe(
        Optics(na=0.85, defocus_nm=60.0, zernikes=((number, 0.08),)), source.points(), (24, 24), 40.0
    )
    mask = random_mask(24, 24, seed=3)
    image = imager(mask)

    def follows(turned: Tensor, wanted: Tensor) -> bool:
        return float((imager(turned) - wanted).abs().max()) < 1e-9

    turns = follows(mask.rot90(), image.rot90())
    mirrors = follows(mask.flip(0), image.flip(0)) and follows(mask.flip(1), image.flip(1))
    assert turns == (not list(broken_by_quarter_turns(source.shape, [number])))
    assert mirrors == (not list(broken_by_mirrors(source.shape, source.angle_deg, [number])))


def test_what_cannot_be_imaged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pixel_nm=60 is too large .* 56\.8 nm or less"):
        abbe(Optics(na=0.85), Source().points(), (32, 32), 60.0)
    with pytest.raises(ConfigError, match="no cell of the source's grid"):
        Source("dipole", sigma_inner=0.79, opening_deg=1, angle_deg=7).points()
