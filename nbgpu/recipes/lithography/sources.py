"""Illumination: the points of a source in the pupil plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nbgpu.errors import ConfigError

Shape = Literal["point", "conventional", "annular", "quadrupole", "quasar", "dipole"]

_POLES_DEG: dict[str, tuple[float, ...]] = {
    "quadrupole": (0, 90, 180, 270),
    "quasar": (45, 135, 225, 315),
    "dipole": (0, 180),
}
_ON_THE_EDGE = 1e-9
"""Tolerance that makes cells whose centre is on an edge count as inside, alike on all sides."""


@dataclass(frozen=True)
class Source:
    """A source that is uniformly bright inside its shape and dark outside.

    Coordinates are sigma: sines of the angles of incidence over NA, so that 1 is the pupil's edge. A square
    of `num_cells` x `num_cells` cells spans -sigma_outer to sigma_outer; each cell whose centre is inside the
    shape becomes one point, and all points have the same weight.

    - point: a point on the axis, fully coherent.
    - conventional: a disc of radius `sigma_outer`.
    - annular: a ring from `sigma_inner` to `sigma_outer`.
    - dipole, quadrupole, quasar: sectors of that ring, `opening_deg` wide, around 0 and 180 degrees; 0, 90,
      180 and 270; 45, 135, 225 and 315. All are rotated by `angle_deg` from the x axis towards y.
    """

    shape: Shape = "annular"
    sigma_inner: float = 0.4
    sigma_outer: float = 0.8
    opening_deg: float = 40.0
    angle_deg: float = 0.0
    num_cells: int = 15

    def points(self) -> Tensor:
        """Return the source points, sigma_x and sigma_y, as (S, 2) in float64.

        Raises:
            ConfigError: no cell is inside the shape.
        """
        if self.shape == "point":
            return torch.zeros(1, 2, dtype=torch.float64)
        n = self.num_cells
        axis = (2 * torch.arange(n, dtype=torch.float64) + 1 - n) / n * self.sigma_outer
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        radius = torch.hypot(x, y)
        inside = radius <= self.sigma_outer + _ON_THE_EDGE
        if self.shape != "conventional":
            inside &= radius >= self.sigma_inner - _ON_THE_EDGE
        if self.shape in _POLES_DEG:
            angle_deg = torch.rad2deg(torch.atan2(y, x))
            # The angle between a cell and the middle of each pole, the shorter way round.
            away_deg = [
                ((angle_deg - pole - self.angle_deg + 180) % 360 - 180).abs()
                for pole in _POLES_DEG[self.shape]
            ]
            inside &= torch.stack(away_deg).amin(dim=0) <= self.opening_deg / 2 + _ON_THE_EDGE
        points = torch.stack([x[inside], y[inside]], dim=1)
        if not len(points):
            raise ConfigError(
                f"no cell of the source's grid is inside its shape ({self}). Take a larger num_cells, or a larger shape"
            )
        return points
