"""Folders in LithoBench's structure: `pixelILT`, `litho`, `printed` or `resist`, `target` and `glp`, whose
files are matched by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.machine.files import folders_below
from nbgpu.recipes.lithography.layouts import GLP, read_layout
from nbgpu.recipes.lithography.pairs import Pair, averaged, size_problem
from nbgpu.recipes.lithography.rasterise import rasterised

MASKS, AERIALS, TARGETS, LAYOUTS = "pixelILT", "litho", "target", "glp"
"""Folders of optimised masks, of their aerial images, and of the designs they should print, as pictures and
as layouts."""
PRINTS = ("printed", "resist")
"""Folders of the printed images of the masks: a pixel above half of white prints."""

_GREY = ("L", "1", "I;16")
_COLOURED = ("RGB", "RGBA", "LA", "P")
"""Modes of pictures that count as grey if their channels are equal."""


def find_lithobench(folder: Path, size: int, pixel_nm: float) -> list[Pair]:
    """Find the pairs of a folder with the subfolders `pixelILT` and `litho`, or of several such folders
    inside it. Files of a pair have the same name.

    `printed` or `resist`, `target` and `glp` are used if they exist, and must then have a file for each mask.
    Only names and headers are read here; `pixel_problems` reads the pixels.

    Raises:
        DataError: a line for each file that has no partner, differs in size from its mask, or cannot be read.
            The message then also has the problems of the other files that `pixel_problems` reports.
    """
    roots = sorted({path.parent for path in folders_below(folder) if path.name == MASKS})
    pairs: list[Pair] = []
    readable: list[Pair] = []
    problems: list[str] = []
    for root in roots:
        prints = [name for name in PRINTS if (root / name).is_dir()]
        if len(prints) > 1:
            problems.append(
                f"{root}: has both {' and '.join(prints)}, which are the same thing. Take one away"
            )
        if not (root / AERIALS).is_dir():
            problems.append(f"{root}: has {MASKS} and no folder {AERIALS}")
            continue
        optional = [*prints[:1], *(name for name in (TARGETS, LAYOUTS) if (root / name).is_dir())]
        files = {kind: _files_by_name(root / kind) for kind in (MASKS, AERIALS, *optional)}
        masks = files[MASKS]
        for kind in (AERIALS, *optional):
            problems += _unmatched(masks, files[kind], kind)
        for name in sorted(masks.keys() & files[AERIALS].keys()):
            pair_files = {kind: named[name] for kind, named in files.items() if name in named}
            header_problems = list(_header_problems(pair_files, size))
            problems += header_problems
            printed = pair_files.get(prints[0]) if prints else None
            design = pair_files.get(TARGETS, pair_files.get(LAYOUTS))
            pair = Pair(str(masks[name]), masks[name], pair_files[AERIALS], printed, design)
            pairs.append(pair)
            if not header_problems:
                readable.append(pair)
    if not pairs and not problems:
        problems = [f"{folder}: has no .png files in folders {MASKS} and {AERIALS}"]
    if problems:
        problems += [problem for pair in readable for problem in pixel_problems(pair, size, pixel_nm)]
        raise DataError("\n".join(problems))
    return pairs


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Return the pictures of a folder, and in the folder `glp` also layouts, by file name without ending."""
    suffixes = (GLP, ".png") if folder.name == LAYOUTS else (".png",)
    # Only regular files: reading a pipe would block forever.
    return {
        path.stem: path
        for path in sorted(folder.glob("*"))
        if path.suffix.lower() in suffixes and path.is_file()
    }


def _unmatched(masks: dict[str, Path], others: dict[str, Path], kind: str) -> Iterator[str]:
    """Yield a message for each mask without a file of its name in the folder `kind`, and for each file
    without a mask."""
    what = "layout" if kind == LAYOUTS else "image"
    for name in sorted(masks.keys() - others.keys()):
        yield f"{masks[name]}: has no {what} of that name in {kind}"
    for name in sorted(others.keys() - masks.keys()):
        yield f"{others[name]}: has no mask of that name in {MASKS}"


def _header_problems(files: dict[str, Path], size: int) -> Iterator[str]:
    """Yield a message for each file of a pair that is no grey picture of the right size; only headers are
    read.

    Args:
        files: the files by kind, the mask first, whose size the others must have.
        size: the edge in pixels to which pictures are averaged down.
    """
    mask_size: tuple[int, int] | None = None
    for kind, path in files.items():
        if path.suffix.lower() == GLP:
            continue
        try:
            with Image.open(path) as image:
                mode, pixels = image.mode, image.size
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            yield f"{path}: cannot be read as a picture: {error}"
            continue
        mask_size = pixels if kind == MASKS else mask_size
        if mode not in _GREY + _COLOURED:
            yield f"{path}: has pixels of the kind {mode}, not grey ones"
        elif problem := size_problem(*pixels, size):
            yield f"{path}: {problem}"
        elif mask_size is not None and pixels != mask_size:
            yield f"{path}: has {pixels[0]} x {pixels[1]} pixels, and its mask {mask_size[0]} x {mask_size[1]}"


def pixel_problems(pair: Pair, size: int, pixel_nm: float) -> Iterator[str]:
    """Yield a line for each mask or target that is not black and white, each coloured picture, and each
    damaged file.

    All files of the pair are read to the end except grey aerial images, which may have any values.
    """
    for path, load in (
        (pair.mask, lambda path: load_png(path, size, binary=True)),
        (pair.aerial, _check_grey),
        (pair.printed, lambda path: load_print(path, size)),
        (pair.design, lambda path: load_design(path, size, pixel_nm)),
    ):
        if isinstance(path, Path):
            try:
                load(path)
            except DataError as error:
                yield str(error)


def _check_grey(path: Path) -> None:
    """Raise DataError for a picture whose colour channels differ. A grey picture is not decoded."""
    with Image.open(path) as image:
        if image.mode in _GREY:
            return
    _grey(path)


def _grey(path: Path) -> np.ndarray:
    """Read a grey picture as (H, W) in float32, 0 to 1.

    Raises:
        DataError: the file cannot be read, or its channels of colour differ.
    """
    try:
        with Image.open(path) as image:
            values = np.asarray(image.convert("RGB") if image.mode in ("P", "RGBA", "LA", "1") else image)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a broken PNG
        raise DataError(f"{path}: cannot be read as a picture: {error}") from None
    if values.ndim == 3:
        if (values != values[..., :1]).any():
            raise DataError(f"{path}: its red, green and blue differ; it takes grey pictures")
        values = values[..., 0]
    return np.asarray(values.astype(np.float32) / np.iinfo(values.dtype).max)


def load_png(path: Path, size: int, *, binary: bool) -> Tensor:
    """Load a picture as (1, size, size) in float32, 0 to 1.

    Raises:
        DataError: the picture is coloured, or it has greys although it should be `binary`.
    """
    grey = _grey(path)
    if binary and not ((grey == 0) | (grey == 1)).all():
        raise DataError(f"{path}: a mask with other values than black and white")
    return averaged(torch.from_numpy(grey)[None], size)


def load_print(path: Path, size: int) -> Tensor:
    """Load a printed image and return the share of each pixel that prints, (1, size, size); the picture
    prints where it is brighter than half of white."""
    return averaged(torch.from_numpy((_grey(path) > 0.5).astype(np.float32))[None], size)


def load_design(path: Path, size: int, pixel_nm: float) -> Tensor:
    """Load a design as (1, size, size), 0 to 1, from a black and white picture or from a layout, whose
    bounding box is centred in the field.

    Raises:
        DataError: the file is unusable, or the layout is larger than the field.
    """
    if path.suffix.lower() != GLP:
        return load_png(path, size, binary=True)
    polygons = read_layout(path)
    corners = np.concatenate(polygons)
    low, high = corners.min(axis=0), corners.max(axis=0)
    field = size * pixel_nm
    if (high - low > field).any():
        width, height = high - low
        raise DataError(
            f"{path}: is {width:g} x {height:g} nm, and {size} pixels of {pixel_nm:g} nm are {field:g}. Change pixel_nm"
        )
    x, y = (low + high - field) / 2
    return torch.from_numpy(rasterised(polygons, (float(x), float(y)), (size, size), pixel_nm))[None]
