"""The process window: the print of a mask over a range of dose and focus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor

from nbgpu.recipes.lithography.contours import crossings, iou, widths_nm
from nbgpu.recipes.lithography.edges import contest_sites, pixel_sites, placement_errors_nm
from nbgpu.recipes.lithography.imaging import abbe, refined
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.resist import Resist
from nbgpu.recipes.lithography.sources import Source
from nbgpu.recipes.lithography.tiles import without_margin

EPE_LIMIT_NM = 15.0
"""An edge that prints further than this from the design, or not at all, is a violation."""
DOSES = (0.98, 1.02)
BAND_DEFOCUS_NM = 25.0
"""The corners of the process variation band: the largest print has the higher dose in focus, the smallest
the lower dose out of focus. They and the limit are those of the mask optimisation contest of ICCAD 2013
(Banerjee, Li and Nassif)."""
_CELLS_PER_PIXEL = 4
"""Cells along each edge of a pixel in which areas are measured."""


@dataclass(frozen=True)
class ProcessCondition:
    """A dose and focus, and measures of a mask's print under them."""

    dose: float
    defocus_nm: float
    cd_nm: float
    """Width of the printed stretch nearest to the middle of the cut row; NaN if no edge crosses the row."""
    mean_epe_nm: float
    """Mean absolute edge placement error over the edges with a contour within reach; NaN if there is no such
    edge."""
    num_lost: int
    """Number of pixel sides at the design's edges with no contour within reach."""
    epe_violations: int
    """Number of the contest's sites (`contest_sites`) at which the print is more than 15 nm from the design,
    or has no edge."""
    iou: float
    """Intersection over union of the printed image and the design."""


def conditions(doses: Sequence[float], defocuses_nm: Sequence[float]) -> list[tuple[float, float]]:
    """Return all pairs (defocus_nm, dose), sorted by defocus: pairs of the same defocus share one aerial
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
    margin: int = 0,
) -> list[ProcessCondition]:
    """Simulate and measure the print of a mask under each (defocus_nm, dose), in the order of `asked`.

    Several ranks can each evaluate a part of `conditions`.

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
        margin: pixels on every side that surround the mask and are not measured; `cut_row` does not count
            them.
    """
    height, width = mask.shape
    row = height // 2 if cut_row is None else margin + cut_row
    inner_nm = margin * pixel_nm, (width - margin) * pixel_nm
    side_sites, epe_sites = (
        sites.inside(*inner_nm) if margin else sites
        for sites in (pixel_sites(design, pixel_nm), contest_sites(design, pixel_nm))
    )
    results = []
    for defocus_nm, group in groupby(asked, key=lambda condition: condition[0]):
        aerial = _aerial(mask, optics, source, pixel_nm, defocus_nm)
        for _, dose in group:
            latent = resist.latent(aerial, pixel_nm, dose)
            side_errors, epe_errors = (
                np.abs(placement_errors_nm(latent, resist.threshold, sites, pixel_nm))
                for sites in (side_sites, epe_sites)
            )
            is_lost = np.isnan(side_errors)
            printed = without_margin((latent > resist.threshold).float(), margin)
            results.append(
                ProcessCondition(
                    dose=dose,
                    defocus_nm=defocus_nm,
                    cd_nm=_middle_width(latent[row], resist.threshold, pixel_nm),
                    mean_epe_nm=float("nan") if is_lost.all() else float(side_errors[~is_lost].mean()),
                    num_lost=int(is_lost.sum()),
                    # NaN, where no edge is near, is not within the limit either.
                    epe_violations=int((~(epe_errors <= EPE_LIMIT_NM)).sum()),
                    iou=float(iou(printed[None], without_margin(design, margin)[None])),
                )
            )
    return results


def pv_band_nm2(
    mask: Tensor, optics: Optics, source: Source, resist: Resist, pixel_nm: float, *, margin: int = 0
) -> float:
    """Return the area of the process variation band in nm^2: the area that prints either with a dose of 1.02
    in focus or with a dose of 0.98 at 25 nm of defocus, but not with both.

    The defocus is added to that of `optics`; for the arguments see `process_window`.
    """
    largest, smallest = (
        resist.latent(_aerial(mask, optics, source, pixel_nm, defocus_nm), pixel_nm, dose)
        for dose, defocus_nm in ((DOSES[1], 0.0), (DOSES[0], BAND_DEFOCUS_NM))
    )
    return band_nm2(largest, smallest, resist.threshold, pixel_nm, margin)


def band_nm2(largest: Tensor, smallest: Tensor, threshold: float, pixel_nm: float, margin: int = 0) -> float:
    """Return the area in nm^2 that only one of two latent images (..., H, W) prints; several images are
    summed."""
    first, second = (
        without_margin(_printed_shares(latent, threshold), _CELLS_PER_PIXEL * margin)
        for latent in (largest, smallest)
    )
    return float((first - second).abs().sum()) * (pixel_nm / _CELLS_PER_PIXEL) ** 2


def _printed_shares(latent: Tensor, threshold: float) -> Tensor:
    """Return the share of each cell's area that prints, with 4 x 4 cells per pixel: (..., H, W) ->
    (..., 4H, 4W).

    Cells at an edge print in part, because the band is often narrower than a cell. Within a cell the image is
    taken as linear.
    """
    height, width = (_CELLS_PER_PIXEL * length for length in latent.shape[-2:])
    values = refined(latent, height, width)
    # The change of the image across a cell, along a row and down a column.
    across, down = ((values.roll(-1, axis) - values.roll(1, axis)).abs() / 2 for axis in (-1, -2))
    rise = across + down
    return (0.5 + (values - threshold) / rise.clamp(min=torch.finfo(values.dtype).tiny)).clamp(0, 1)


def _aerial(mask: Tensor, optics: Optics, source: Source, pixel_nm: float, defocus_nm: float) -> Tensor:
    """Return the aerial image (H, W) of a mask with a defocus that is added to that of the lens."""
    height, width = mask.shape
    defocused = replace(optics, defocus_nm=optics.defocus_nm + defocus_nm)
    precision = torch.complex64 if mask.dtype == torch.float32 else torch.complex128
    return abbe(defocused, source.points().to(mask.device), (height, width), pixel_nm, precision)(mask)


def _middle_width(profile: Tensor, threshold: float, pixel_nm: float) -> float:
    """Return the width in nm of the printed stretch whose middle is nearest to the middle of a profile (N,);
    NaN if the profile crosses the threshold nowhere."""
    values = profile.detach().cpu().double().numpy()
    up, _ = crossings(values, threshold)
    widths = widths_nm(values, threshold, pixel_nm)
    if not len(widths):
        return float("nan")
    num_pixels = len(values)
    centres = (up + widths / pixel_nm / 2) % num_pixels
    return float(widths[np.abs(centres - num_pixels / 2).argmin()])
