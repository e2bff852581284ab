"""Printed images drawn over the intended layout: contours, edge placement errors and critical dimensions, of
one mask and of several side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from nbgpu.recipes import side_by_side
from nbgpu.recipes.lithography.contours import contours
from nbgpu.recipes.lithography.edges import (
    Cut,
    Sites,
    pixel_sites,
    placement_errors_nm,
    polygon_sites,
    smooth_contours_nm,
    stretches_nm,
)
from nbgpu.recipes.lithography.rasterise import Polygon
from nbgpu.recipes.lithography.tiles import without_margin
from nbgpu.recipes.side_by_side import Colours, Grid

CONTOUR, WIDTH, LOST = "#000000", "#009e73", "#cc79a7"
TRUE, FOUND = "#0072b2", "#d55e00"
"""Colours: of contours, of widths and of sites without a contour; of true and of found contours."""
ERROR_COLOURS = "PuOr_r"
_INCHES, _DPI = 6.0, 110
_OVERLAY_PX = 240


@dataclass(frozen=True, repr=False)
class Overlay:
    """A comparison of the printed image with the intended layout.

    A notebook shows it as a picture; `draw` draws it into the caller's own axes.
    """

    layout: Tensor | Sequence[Polygon]
    field_nm: tuple[float, float]
    """Width and height of the field."""
    contours_nm: Sequence[np.ndarray]
    """Contours of the printed image, each (N, 2): x, y."""
    sites: Sites
    errors_nm: np.ndarray
    """Edge placement error at each site, along the edge's normal: positive where too much prints, NaN where
    no contour is within reach."""
    cuts: Sequence[Cut]
    stretches_nm: Sequence[np.ndarray]
    """Beginnings and ends of the printed stretches along each cut, (N, 2) per cut."""

    @property
    def table(self) -> dict[str, float]:
        """The mean absolute edge placement error, the mean error and the worst error, in nm, over the sites
        with a contour within reach; and the numbers of all sites and of lost sites."""
        is_lost = np.isnan(self.errors_nm)
        # Without any error, the statistics are those of a single NaN.
        errors = self.errors_nm[~is_lost] if not is_lost.all() else np.array([np.nan])
        return {
            "mean_size_nm": float(np.abs(errors).mean()),
            "mean_nm": float(errors.mean()),
            "worst_nm": float(errors[np.abs(errors).argmax()]),
            "num_sites": len(self.errors_nm),
            "num_lost": int(is_lost.sum()),
        }

    @property
    def widths_nm(self) -> list[np.ndarray]:
        """The critical dimensions along each cut, in nm."""
        return [stretches[:, 1] - stretches[:, 0] for stretches in self.stretches_nm]

    def draw(self, axes: Axes, largest_nm: float | None = None, dot: float = 9.0) -> Normalize:
        """Draw the layout in grey, contours as lines, a dot at each site in the colour of its error, and each
        width with its value.

        Args:
            axes: matplotlib axes.
            largest_nm: the error that gets the strongest colour; by default that of `largest_shown_nm`.
            dot: the size of the dots, in points squared.

        Returns:
            The normalisation that maps errors to colours, for a colour bar.
        """
        width, height = self.field_nm
        if isinstance(self.layout, Tensor):
            axes.imshow(
                self.layout.detach().cpu().numpy(),
                cmap="gray_r",
                vmin=0,
                vmax=5,
                origin="lower",
                extent=(0, width, 0, height),
            )
        else:
            axes.add_collection(PolyCollection(list(self.layout), facecolor="#d9d9d9", edgecolor="none"))
        axes.add_collection(LineCollection(list(self.contours_nm), colors=CONTOUR, linewidths=0.8))
        lost = np.isnan(self.errors_nm)
        largest = largest_nm or largest_shown_nm([self.errors_nm])
        colours = Normalize(-largest, largest)
        places = self.sites.points_nm
        axes.scatter(
            places[~lost, 0],
            places[~lost, 1],
            c=self.errors_nm[~lost],
            cmap=ERROR_COLOURS,
            norm=colours,
            s=dot,
            zorder=3,
            edgecolors="#00000055",
            linewidths=0.03 * dot,
        )
        axes.scatter(places[lost, 0], places[lost, 1], marker="x", c=LOST, s=12, linewidths=0.8, zorder=3)
        for cut, stretches in zip(self.cuts, self.stretches_nm, strict=True):
            for stretch in stretches:
                ends = cut.at(stretch)
                axes.plot(*ends.T, "|-", color=WIDTH, linewidth=1.2, zorder=4)
                axes.annotate(
                    f"{stretch[1] - stretch[0]:.1f}",
                    ends.mean(axis=0),
                    (0, 3),
                    textcoords="offset points",
                    color=WIDTH,
                    fontsize=7,
                    ha="center",
                    zorder=5,
                )
        axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
        return colours

    def __repr__(self) -> str:
        """One line, because a saved notebook keeps it beside the picture."""
        table = self.table
        widths = ", ".join(f"{width:.1f}" for cut_widths in self.widths_nm for width in cut_widths)
        return (
            f"<Overlay: {table['num_sites']:.0f} sites at edges, mean error {table['mean_nm']:.1f} nm, "
            f"worst {table['worst_nm']:.1f} nm, {table['num_lost']:.0f} with no contour; widths in nm: {widths or 'none'}>"
        )

    def _repr_png_(self) -> bytes:
        """Return the picture that Jupyter shows for an Overlay, with axes in nm and a bar for the colours of
        the errors."""
        figure = Figure(figsize=(_INCHES, _INCHES * 0.85), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        colours = self.draw(axes)
        axes.set(xlabel="x, nm", ylabel="y, nm")
        bar = figure.colorbar(ScalarMappable(colours, ERROR_COLOURS), ax=axes, extend="both")
        bar.set_label("edge placement error, nm (positive: prints beyond the edge)")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()


def largest_shown_nm(errors_nm: Sequence[np.ndarray]) -> float:
    """Return the largest error of a colour scale: the 95th percentile of the absolute errors, at least 1 nm.

    Line ends have large errors, and a scale up to the largest error would leave everything else pale.
    """
    sizes = np.abs(np.concatenate(errors_nm))
    sizes = sizes[~np.isnan(sizes)]
    return max(1.0, float(np.quantile(sizes, 0.95))) if len(sizes) else 1.0


def overlay(
    layout: Tensor | Sequence[Polygon],
    image: Tensor,
    threshold: float,
    pixel_nm: float,
    *,
    spacing_nm: float | None = None,
    corner_nm: float = 0.0,
    reach_nm: float = 100.0,
    cuts: Sequence[Cut] = (),
) -> Overlay:
    """Compare what an image prints with a layout.

    Args:
        layout: the intended layout: pixels (H, W), 0 to 1, or polygons in nm in the image's coordinates, with
            edges in any direction.
        image: an image (H, W), such as the aerial image of a mask, or a resist's latent image.
        threshold: the level above which the image prints.
        pixel_nm: the width of the image's pixels. Column c covers x from c to c + 1 pixels, and row r covers
            y likewise.
        spacing_nm: the distance between sites on a polygon's edge, by default one pixel. A layout of pixels
            has one site on each pixel side.
        corner_nm: sites closer than this to an end of their edge are left out.
        reach_nm: the distance from an edge within which its contour is searched for.
        cuts: lines along which widths are measured.
    """
    height, width = image.shape
    field = (width * pixel_nm, height * pixel_nm)
    if isinstance(layout, Tensor):
        sites = pixel_sites(layout, pixel_nm, corner_nm)
    else:
        sites = polygon_sites(layout, spacing_nm or pixel_nm, corner_nm, field)
    return Overlay(
        layout,
        field,
        smooth_contours_nm(image, threshold, pixel_nm),
        sites,
        placement_errors_nm(image, threshold, sites, pixel_nm, reach_nm),
        tuple(cuts),
        [stretches_nm(image, threshold, cut, pixel_nm) for cut in cuts],
    )


def row(images: Tensor, colours: Colours, grid: Grid) -> str:
    """Draw images (N, H, W) side by side."""
    return side_by_side.figure_uri(side_by_side.row(list(images.numpy()), colours, grid))


def draw_contours(masks: Tensor, true: Tensor, found: Tensor, threshold: float, pixel_nm: float) -> str:
    """Draw the contours of two sets of images (N, H, W) at a threshold over the masks: the true contours in
    blue, the found ones in orange."""
    grid = Grid("nm", pixel_nm)

    def draw(axes: Axes, index: int) -> None:
        """Draw one mask in pale grey and the contours of its two images over it."""
        mask = masks[index].numpy()
        axes.imshow(
            mask, cmap="gray_r", vmin=0, vmax=4, origin="lower", extent=grid.extent(mask), aspect="auto"
        )
        for image, colour, dashes in ((true, TRUE, "-"), (found, FOUND, "--")):
            for line in contours(image[index], threshold, pixel_nm):
                axes.plot(*np.asarray(line).T, dashes, color=colour, linewidth=0.9)

    return side_by_side.figure_uri(side_by_side.row(list(masks.numpy()), None, grid, draw_over=draw))


def draw_errors(designs: Tensor, images: Tensor, threshold: float, pixel_nm: float, margin: int = 0) -> str:
    """Draw what images print over the designs, side by side, and return a PNG as a data URI.

    A dot at each edge of a design has the colour of its placement error, on a scale for the errors that are
    shown. Widths are measured along the middle row.

    Args:
        designs: the intended layouts (N, H, W), from 0 to 1.
        images: the images (N, H, W), which print where they are above `threshold`.
        threshold: the level above which an image prints.
        pixel_nm: the width of a pixel.
        margin: the pixels on every side that are not shown.
    """
    height, width = (length * pixel_nm for length in designs.shape[1:])
    margin_nm = margin * pixel_nm
    middle = Cut((margin_nm, height / 2), (width - margin_nm, height / 2))
    overlays = [
        overlay(design, image, threshold, pixel_nm, cuts=[middle])
        for design, image in zip(designs, images, strict=True)
    ]
    # The colour scale is that of the sites inside the margins, which are shown.
    ends_nm = np.array([width, height]) - margin_nm
    shown_errors_nm = [
        one.errors_nm[((one.sites.points_nm >= margin_nm) & (one.sites.points_nm < ends_nm)).all(axis=1)]
        for one in overlays
    ]
    largest = largest_shown_nm(shown_errors_nm)

    def draw(axes: Axes, index: int) -> None:
        overlays[index].draw(axes, largest, dot=3.0)
        # The tile has the image's proportions already, and "equal" would shrink the image.
        axes.set_aspect("auto")

    colours = Colours("error, nm", -largest, largest, ERROR_COLOURS)
    inner = without_margin(designs, margin)
    grid = Grid("nm", pixel_nm, start=margin_nm)
    figure = side_by_side.row(list(inner.numpy()), colours, grid, draw_over=draw, least_px=_OVERLAY_PX)
    return side_by_side.figure_uri(figure)
