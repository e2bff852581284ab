"""Writes the predictions of a learned lens: aerial images, and the contours of their prints."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from contourpy import FillType, contour_generator
from matplotlib.axes import Axes
from torch import Tensor

from nbgpu.recipes import side_by_side
from nbgpu.recipes.lithography.contours import contours
from nbgpu.recipes.lithography.overlay import FOUND
from nbgpu.recipes.side_by_side import Colours, Grid
from nbgpu.run_folder.predictions import Job, Row

CONTOURS_GDS = "contours.gds"
_PICTURE_PX = 360
_GDS_UNIT_M, _GDS_PRECISION_M = 1e-9, 1e-12


def write_image(image: Tensor, stem: Path, kind: str) -> Path:
    """Write an image (H, W), the first row at the bottom, as float32; `kind` is 'aerial' or 'resist'."""
    path = stem.with_name(f"{stem.name}.{kind}.npy")
    np.save(path, image.numpy())
    return path


def write_contours(
    latent: Tensor, threshold: float, pixel_nm: float, origin_nm: tuple[float, float], stem: Path
) -> Path:
    """Write the printed area of an image as polygons with holes.

    The file is JSON: `unit` and `polygons`, each a list of rings of [x, y] in nm, the outline first and then
    its holes. A polygon at the field's edge ends there, half a pixel inside.

    Args:
        latent: the image in the resist, (H, W), the first row at the bottom.
        threshold: a pixel prints where the image is above this level.
        pixel_nm: the width of a pixel.
        origin_nm: where the image's lower left corner lies, (x, y).
        stem: the path of the file without ending.
    """
    generator = contour_generator(z=latent.double().numpy(), fill_type=FillType.OuterOffset)
    filled: tuple[Any, ...] = generator.filled(threshold, np.inf)
    polygons = []
    # contourpy returns, for each polygon, the corners of all its rings, and the offsets of the rings.
    for corners, offsets in zip(*filled, strict=True):
        # The value of pixel i belongs to its centre, at i + 1/2.
        corners_nm = np.round((corners + 0.5) * pixel_nm + np.array(origin_nm), 3)
        polygons.append([ring.tolist() for ring in np.split(corners_nm, offsets[1:-1])])
    path = stem.with_name(f"{stem.name}.contours.json")
    path.write_text(json.dumps({"unit": "nm", "polygons": polygons}) + "\n")
    return path


def write_picture(
    mask: Tensor, image: Tensor, latent: Tensor, threshold: float, pixel_nm: float, stem: Path
) -> Path:
    """Draw a mask and its aerial image side by side, with the contour of the print in both; return the path
    of the PNG file.

    Args:
        mask: the mask, (H, W).
        image: the aerial image, (H, W).
        latent: the image in the resist, (H, W), from which the contour is taken.
        threshold: the level of `latent` above which the resist prints.
        pixel_nm: the width of a pixel.
        stem: the path of the file without its ending.
    """
    images = [mask.numpy(), image.numpy()]
    grid = Grid("nm", pixel_nm)

    def draw(axes: Axes, index: int) -> None:
        """Draw the contours of the print over the mask (0) or over the aerial image (1)."""
        if index == 0:
            # `row` has drawn the mask in colour. Pale grey covers it, so that the contours stand out.
            extent = grid.extent(images[0])
            axes.imshow(
                images[0], cmap="gray_r", vmin=0, vmax=4, origin="lower", extent=extent, aspect="auto"
            )
        for line in contours(latent, threshold, pixel_nm):
            axes.plot(*np.asarray(line).T, color=FOUND, linewidth=0.9)

    colours = Colours("intensity", 0, max(float(image.max()), 1e-9), "viridis")
    titles = ("mask, with what prints", "aerial image")
    figure = side_by_side.row(images, colours, grid, titles, draw_over=draw, least_px=_PICTURE_PX)
    path = stem.with_name(f"{stem.name}.png")
    figure.savefig(path)
    return path


def write_gds(rows: Sequence[Row], job: Job) -> list[str]:
    """Write the contours of all tiles of layouts into one GDSII file with a cell for each layout, in the
    coordinates of the layout; return a sentence about it. Nothing is written if no mask is from a layout."""
    by_layout: dict[str, list[Row]] = {}
    for row in rows:
        if row.aside.get("layout"):
            by_layout.setdefault(row.aside["layout"], []).append(row)
    if not by_layout:
        return []
    if find_spec("gdstk") is None:
        return [f"{CONTOURS_GDS} is written with gdstk, which is not installed: pip install 'nbgpu[gdsii]'"]
    import gdstk

    library = gdstk.Library(unit=_GDS_UNIT_M, precision=_GDS_PRECISION_M)
    for name, layout_rows in zip(_cell_names(by_layout), by_layout.values(), strict=True):
        cell = library.new_cell(name)
        for row in layout_rows:
            file = next(file for file in row.files if file.endswith(".contours.json"))
            for outline, *holes in json.loads((Path(job.out) / file).read_text())["polygons"]:
                polygon = gdstk.Polygon(outline)
                # GDSII has no holes: the difference joins each hole to the outline by a cut.
                parts = gdstk.boolean(polygon, [*map(gdstk.Polygon, holes)], "not") if holes else [polygon]
                cell.add(*parts)
    library.write_gds(Path(job.out) / CONTOURS_GDS)
    return [f"{CONTOURS_GDS} has all contours in the coordinates of the layouts, on layer 0"]


def _cell_names(layouts: Collection[str]) -> Iterator[str]:
    """Yield a GDSII cell name for each layout's path: its file name, with a number if there are several."""
    for number, layout in enumerate(layouts):
        name = "".join(c if c.isalnum() else "_" for c in Path(layout).stem)
        yield name if len(layouts) == 1 else f"{name}_{number}"
