"""The process window: what a mask prints over a range of dose and focus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor

from nbgpu.recipes.lithography.contours import crossings, iou, widths_nm
from nbgpu.recipes.lithography.edges import edge_placement_errors_nm
from nbgpu.recipes.lithography.imaging import abbe
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.resist import Resist
from nbgpu.recipes.lithography.sources import Source


@dataclass(frozen=True)
class Condition:
    """A dose and focus, and measures of what a mask prints under them."""

    dose: float
    defocus_nm: float
    cd_nm: float
    """Width of the printed stretch nearest to the middle of the cut; NaN if no edge crosses the cut."""
    mean_epe_nm: float
    """Mean absolute edge placement error over the edges with a contour within reach; NaN if there is no such
    edge."""
    num_lost: int
    """Number of edges with no contour within reach."""
    iou: float
    """Intersection over union of the printed image and the design."""


def conditions(doses: Sequence[float], defocuses_nm: Sequence[float]) -> list[tuple[float, float]]:
    """Return all (defocus_nm, dose), with those of one focus next to each other because they share one aerial
    image."""
    return list(product(defocuses_nm, doses))


def process_window(
    mask: Tensor,
    design: Tensor,
    optics: Optics,
    source: Source,
    resist: Resist,
    pixel_nm: float,
    asked: Sequence[tuple[float, float]],
    *,
    cut_row: int | None = None,
) -> list[Condition]:
    """Return what the mask prints under each (defocus_nm, dose), in the order of `asked`.

    Several ranks can each take a part of `conditions`; their results put together are those of a single rank.

    Args:
        mask: the amplitude transmission, (H, W), in float32 or float64, which sets the precision of the
            computation.
        design: what the mask should print, (H, W), 0 to 1.
        optics: the lens; its defocus is added to that of each condition.
        source: the illumination.
        resist: the resist.
        pixel_nm: the width of a pixel at the wafer.
        asked: the result of `conditions`, or a part of it.
        cut_row: the row along which the critical dimension is measured, by default the middle row.
    """
    shape = (int(mask.shape[0]), int(mask.shape[1]))
    dtype = torch.complex64 if mask.dtype == torch.float32 else torch.complex128
    row = shape[0] // 2 if cut_row is None else cut_row
    found = []
    for defocus_nm, group in groupby(asked, key=lambda condition: condition[0]):
        moved = replace(optics, defocus_nm=optics.defocus_nm + defocus_nm)
        aerial = abbe(moved, source.points().to(mask.device), shape, pixel_nm, dtype)(mask)
        for _, dose in group:
            latent = resist.latent(aerial, pixel_nm, dose)
            errors = edge_placement_errors_nm(latent, resist.threshold, design, pixel_nm)
            seen = errors[~errors.isnan()].abs()
            found.append(
                Condition(
                    dose=dose,
                    defocus_nm=defocus_nm,
                    cd_nm=_middle_width(latent[row], resist.threshold, pixel_nm),
                    mean_epe_nm=float(seen.mean()) if len(seen) else float("nan"),
                    num_lost=int(errors.isnan().sum()),
                    iou=float(iou((latent > resist.threshold)[None].float(), design[None])),
                )
            )
    return found


def _middle_width(profile: Tensor, threshold: float, pixel_nm: float) -> float:
    values = profile.detach().cpu().double().numpy()
    up, _ = crossings(values, threshold)
    widths = widths_nm(values, threshold, pixel_nm)
    if not len(widths):
        return float("nan")
    num_pixels = len(values)
    centres = (up + widths / pixel_nm / 2) % num_pixels
    return float(widths[np.abs(centres - num_pixels / 2).argmin()])
