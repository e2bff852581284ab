"""The projection lens: a circular pupil with defocus and Zernike aberrations, in scalar theory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nbgpu.recipes.lithography.symmetry import fringe_order

_ON_THE_EDGE = 1e-9
"""Tolerance that lets frequencies on the pupil's edge pass, alike on all sides."""


@dataclass(frozen=True)
class Optics:
    """The action of the lens on each direction of light.

    The phase in waves at the pupil radius rho, which is 1 at NA, is

        defocus / wavelength * (sqrt(n^2 - NA^2 rho^2) - n) + sum of c_j Z_j(rho, theta)

    The first term is the exact path of a plane wave over a distance along the axis (not the paraxial rho^2).
    Z_j are the Zernike polynomials in Fringe order (University of Arizona), 1 to 36, each scaled to 1 at its
    maximum on the rim: 4 is defocus, 5 and 6 astigmatism, 7 and 8 coma, 9 spherical aberration. The model has
    neither polarisation nor losses at oblique angles.

    Attributes:
        wavelength_nm: the wavelength in vacuum.
        na: the numerical aperture at the wafer, below `medium_index`.
        medium_index: the refractive index of the medium between lens and resist: 1 for air, 1.437 for water
            at 193 nm.
        defocus_nm: the distance of the resist from focus; a tensor if gradients are needed.
        zernikes: pairs of (Fringe number, waves); waves may be a tensor.
    """

    wavelength_nm: float = 193.0
    na: float = 0.85
    medium_index: float = 1.0
    defocus_nm: float | Tensor = 0.0
    zernikes: tuple[tuple[int, float | Tensor], ...] = ()

    @property
    def cutoff_per_nm(self) -> float:
        """NA / wavelength, the highest spatial frequency of the amplitude under on-axis illumination."""
        return self.na / self.wavelength_nm

    def pupil(self, fx: Tensor, fy: Tensor) -> Tensor:
        """Return the factor by which the lens multiplies each spatial frequency of the amplitude, complex128.

        Args:
            fx, fy: frequencies per nm, float64, of shapes that broadcast.
        """
        x, y = fx / self.cutoff_per_nm, fy / self.cutoff_per_nm
        squared = x.square() + y.square()
        inside = (squared <= 1 + _ON_THE_EDGE).double()
        squared = squared.clamp(max=1)
        n, na = self.medium_index, self.na
        waves = (torch.sqrt(n * n - na * na * squared) - n) * (self.defocus_nm / self.wavelength_nm)
        for number, amount in self.zernikes:
            waves = waves + amount * zernike(number, squared.sqrt(), torch.atan2(y, x))
        return torch.polar(inside, 2 * math.pi * waves)


def zernike(number: int, rho: Tensor, theta: Tensor) -> Tensor:
    """Return the Zernike polynomial with this Fringe number, 1 to 36, at rho <= 1.

    It is not normalised: its largest value is 1.
    """
    n, m = fringe_order(number)
    k = abs(m)
    radial = torch.zeros_like(rho)
    # The radial polynomial, whose coefficients are quotients of factorials (Born & Wolf, section 9.2).
    for s in range((n - k) // 2 + 1):
        factor = math.factorial(n - s) // (
            math.factorial(s) * math.factorial((n + k) // 2 - s) * math.factorial((n - k) // 2 - s)
        )
        radial = radial + (-1) ** s * factor * rho ** (n - 2 * s)
    return radial * (torch.cos(k * theta) if m >= 0 else torch.sin(k * theta))
