"""Errors of printed images: of their edges and widths against those of the true images, and of their edges
against the design."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nbgpu.recipes.lithography.contours import iou
from nbgpu.recipes.lithography.edges import (
    Cut,
    Sites,
    contest_sites,
    pixel_sites,
    placement_errors_nm,
    stretches_nm,
)
from nbgpu.recipes.lithography.resist import Resist
from nbgpu.recipes.lithography.tiles import without_margin
from nbgpu.recipes.lithography.window import DOSES, EPE_LIMIT_NM, band_nm2


@dataclass(frozen=True)
class Reference:
    """The true images of several masks and the edges of the designs, against which images are measured."""

    images: Tensor
    """The true images, (N, 1, H, W)."""
    latent: Tensor
    """The true images in the resist, (N, H, W)."""
    sides: list[Sites]
    """The pixel sides at edges of the design."""
    contest: list[Sites]
    """The sites at which the contest counts EPE violations (`contest_sites`)."""
    placements_nm: list[np.ndarray]
    """The placement errors of the true images at the pixel sides."""


@dataclass(frozen=True)
class Measures:
    """Measures of images (N, 1, H, W), over their inner pixels.

    Args:
        resist: turns an image into the printed pattern.
        pixel_nm: the width of a pixel.
        margin: pixels on every side that surround a tile and are not measured themselves.
    """

    resist: Resist
    pixel_nm: float
    margin: int = 0

    def inner(self, images: Tensor) -> Tensor:
        """Return images without their margins."""
        return without_margin(images, self.margin)

    def printed(self, images: Tensor) -> Tensor:
        """Return the printed pattern of images (N, 1, H, W) without margins, 0 to 1."""
        return self.inner(self.resist.printed(images, self.pixel_nm))

    def iou(self, found: Tensor, true: Tensor) -> Tensor:
        """Return the intersection over union of the printed patterns of two sets of images, per sample:
        (N,)."""
        return iou(self.printed(found), self.printed(true))

    def reference(self, true: Tensor, designs: Tensor) -> Reference:
        """Compute the latent images, the sites on the designs' edges and the true placement errors once for
        several methods.

        Args:
            true: the true images, (N, 1, H, W).
            designs: the designs, of the same shape, 0 to 1.
        """
        latent = self._latent(true)
        sides, contest = (
            [self._inside(sites(design, self.pixel_nm), design) for design in designs[:, 0]]
            for sites in (pixel_sites, contest_sites)
        )
        placements_nm = [self._placement(image, sites) for image, sites in zip(latent, sides, strict=True)]
        return Reference(true, latent, sides, contest, placements_nm)

    def errors(self, found: Tensor, reference: Reference) -> dict[str, float]:
        """Return the errors of images (N, 1, H, W) against the true images, and of their prints against the
        designs:

        - `mse`, `mae`: of the intensity; `iou`: of the printed patterns.
        - `cd_nm`: the mean difference of the printed widths along the middle row; `cds_lost`: the number of
          true widths that are left out, because the images print different numbers of stretches in the row.
        - `edge_nm`: the mean distance, normal to the designs' edges, between the printed edges of both
          images; `edges_lost`: the number of pixel sides that are left out, because only one of both images
          prints an edge nearby.
        - `epe_violations`: the number of sites of `contest_sites` at which the image prints no edge within
          15 nm of the design.
        - `dose_band_nm2`: the mean area per mask that prints with one of the doses 0.98 and 1.02 but not with
          the other.
        """
        difference = self.inner(found - reference.images)
        latent = self._latent(found)
        edges, violations = self._edges(latent, reference)
        widths, cds_lost = self._widths(latent, reference.latent)
        return {
            "mse": float(f"{float(difference.square().mean()):.3g}"),
            "mae": round(float(difference.abs().mean()), 5),
            "iou": round(float(self.iou(found, reference.images).mean()), 4),
            "cd_nm": _mean(widths),
            "cds_lost": cds_lost,
            # Both errors are measured from the same site of the design, so their difference is the distance
            # between the two printed edges.
            "edge_nm": _mean(edges[~np.isnan(edges).any(axis=1)] @ [1.0, -1.0]),
            "edges_lost": int((np.isnan(edges).sum(axis=1) == 1).sum()),
            "epe_violations": violations,
            "dose_band_nm2": round(float(np.mean([self._band_nm2(image) for image in latent]))),
        }

    def _latent(self, images: Tensor) -> Tensor:
        return self.resist.latent(images, self.pixel_nm)[:, 0]

    def _inside(self, sites: Sites, design: Tensor) -> Sites:
        low = self.margin * self.pixel_nm
        return sites.inside(low, (design.shape[-1] - self.margin) * self.pixel_nm) if self.margin else sites

    def _edges(self, latent: Tensor, reference: Reference) -> tuple[np.ndarray, int]:
        """Return the placement errors of the images and of the true images at the pixel sides, (K, 2), NaN
        where no edge prints nearby, and the number of EPE violations of the images."""
        errors, violations = [np.empty((0, 2))], 0
        for image, sides, contest, true in zip(
            latent, reference.sides, reference.contest, reference.placements_nm, strict=True
        ):
            errors.append(np.stack([self._placement(image, sides), true], axis=1))
            violations += int((~(np.abs(self._placement(image, contest)) <= EPE_LIMIT_NM)).sum())
        return np.concatenate(errors), violations

    def _band_nm2(self, latent: Tensor) -> float:
        """Return the area in nm^2 that a latent image (H, W) prints with one of the two doses only."""
        low, high = (latent * dose for dose in DOSES)
        return band_nm2(high, low, self.resist.threshold, self.pixel_nm, self.margin)

    def _placement(self, image: Tensor, sites: Sites) -> np.ndarray:
        """Return the edge placement errors (K,) of a latent image (H, W), in nm; NaN for lost edges."""
        return placement_errors_nm(image, self.resist.threshold, sites, self.pixel_nm)

    def _widths(self, latent: Tensor, true_latent: Tensor) -> tuple[np.ndarray, int]:
        """Return the differences of the printed widths along the middle rows, in nm, and the number of true
        widths that cannot be compared, because the images print different numbers of stretches."""
        differences, num_lost = [np.empty(0)], 0
        for images in zip(latent, true_latent, strict=True):
            height, width = images[0].shape
            left, right = (self.pixel_nm * column for column in (self.margin, width - self.margin))
            middle = self.pixel_nm * height / 2
            cut = Cut((left, middle), (right, middle))
            found, true = (
                np.diff(stretches_nm(image, self.resist.threshold, cut, self.pixel_nm)) for image in images
            )
            if len(found) == len(true):
                differences.append((found - true).ravel())
            else:
                num_lost += len(true)
        return np.concatenate(differences), num_lost


def _mean(differences: np.ndarray) -> float:
    return round(float(np.abs(differences).mean()), 2) if len(differences) else float("nan")
