"""Pairs of a mask and its images, and .npz archives of such pairs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from nbgpu.errors import DataError

_MAX_SHOWN = 20


@dataclass(frozen=True)
class Pair:
    """A mask and the images known for it, as files or as (1, H, W) in float32."""

    name: str
    mask: Path | Tensor
    aerial: Path | Tensor | None = None
    """Aerial image of the mask; None if it is to be simulated."""
    printed: Path | None = None
    """Printed image of the mask."""
    design: Path | None = None
    """Design that the mask should print, as a picture or a .glp."""
    origin_nm: tuple[float, float] | None = None
    """Where the lower left corner of the mask, without margins, lies in its layout: (x, y)."""
    layout: Path | None = None
    """The layout that it is cut from."""
    region: str | None = None
    """The part of a layout that it is cut from. All masks of a region are in the same part of the data:
    training, validation or test."""


def read_npz(path: Path, size: int, pixel_nm: float) -> list[Pair]:
    """Read the pairs of an archive with `masks` and optionally `aerials`, each (N, H, W) or (N, H, W, 1), and
    average them down to size x size pixels.

    If the archive has `pixel_nm`, the width of the pixels in the archive, it must agree with the argument
    `pixel_nm`, the width after averaging.

    Raises:
        DataError: everything that is wrong with the archive.
    """
    try:
        # The file is opened here because numpy leaves the file of a damaged archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("masks", "aerials", "pixel_nm") if name in archive}
            all_names = ", ".join(archive.files)
    except (OSError, ValueError, EOFError, TypeError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an .npz archive of numbers: {error}") from None
    if "masks" not in arrays:
        raise DataError(f"{path}: has no array 'masks'. Arrays: {all_names or '(none)'}")
    stated_nm = arrays.pop("pixel_nm", None)
    problems = [
        f"{path}: {name}: {problem}" for name, a in arrays.items() for problem in _shape_problems(a, size)
    ]
    if not problems:
        images = {name: a[..., 0] if a.ndim == 4 else a for name, a in arrays.items()}
        problems = [f"{path}: {problem}" for problem in _value_problems(images)]
        times = images["masks"].shape[1] // size
        if stated_nm is not None and not np.isclose(float(stated_nm) * times, pixel_nm):
            problems.append(
                f"{path}: has pixels of {float(stated_nm):g} nm, which are {float(stated_nm) * times:g} nm at "
                f"{size} x {size}, and pixel_nm is {pixel_nm:g}"
            )
    if problems:
        raise DataError("\n".join(problems))
    tensors = {
        name: averaged(torch.from_numpy(a.astype(np.float32))[:, None], size) for name, a in images.items()
    }
    aerials = tensors.get("aerials", [None] * len(tensors["masks"]))
    return [
        Pair(f"{path} number {i}", mask, aerial)
        for i, (mask, aerial) in enumerate(zip(tensors["masks"], aerials, strict=True))
    ]


def _shape_problems(array: np.ndarray, size: int) -> Iterator[str]:
    """Yield a message if an array of an archive holds no numbers, has no images, or images that cannot be
    averaged down to size x size pixels."""
    if array.dtype.kind not in "fbui":
        yield f"holds {array.dtype}, not numbers"
    elif array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] != 1):
        yield f"has the shape {array.shape}; it takes (N, H, W) or (N, H, W, 1)"
    elif not len(array):
        yield "is empty"
    elif problem := size_problem(array.shape[2], array.shape[1], size):
        yield problem


def size_problem(width: int, height: int, size: int) -> str | None:
    """Return why a picture cannot be averaged down to size x size pixels, or None if it can."""
    if width == height and width % size == 0:
        return None
    return f"has {width} x {height} pixels, which cannot be averaged down to {size} x {size}. Change size"


def _value_problems(images: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield messages about the values of an archive's arrays (N, H, W): different shapes, NaN, masks that are
    not black and white, and negative intensities."""
    shapes = {name: image.shape for name, image in images.items()}
    if len(set(shapes.values())) > 1:
        yield f"masks and aerials differ in shape: {shapes['masks']} and {shapes['aerials']}"
    finite = {name: np.isfinite(image).all(axis=(1, 2)) for name, image in images.items()}
    for name, good in finite.items():
        if not good.all():
            yield f"{name}: NaN or infinite values in {_numbers(~good)}"
    greys = ~np.isin(images["masks"], (0, 1)).all(axis=(1, 2)) & finite["masks"]
    if greys.any():
        yield f"masks: other values than 0 and 1 in {_numbers(greys)}"
    if "aerials" in images and (negative := np.asarray((images["aerials"] < 0).any(axis=(1, 2)))).any():
        yield f"aerials: intensities below 0 in {_numbers(negative)}"


def _numbers(bad: np.ndarray) -> str:
    """Return a phrase with the indices at which a boolean array (N,) is True, such as 'numbers 3, 7'."""
    indices = np.flatnonzero(bad)
    more = f" and {len(indices) - _MAX_SHOWN} more" if len(indices) > _MAX_SHOWN else ""
    return f"number{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices[:_MAX_SHOWN]))}{more}"


def averaged(images: Tensor, size: int) -> Tensor:
    """Return square images (N, C, H, W) or (C, H, W) averaged down to size x size pixels."""
    times = images.shape[-1] // size
    return avg_pool2d(images, times) if times > 1 else images
