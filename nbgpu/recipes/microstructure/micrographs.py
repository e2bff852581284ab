"""Reads micrographs: arrays in .npy files, PNG and TIFF pictures, and TIFF files of several pages; a picture
of grey values is cut into two phases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from nbgpu.errors import DataError

PICTURE_SUFFIXES = (".png", ".tif", ".tiff")
READ_ERRORS = (OSError, ValueError, EOFError, SyntaxError, UnidentifiedImageError)
"""The errors of NumPy and Pillow for a damaged file; Pillow raises SyntaxError for a broken PNG."""
_MAX_PHASES = 8
"""Integers with more different values than this count as grey values, not as phases."""
_BLACK_AND_WHITE = ((0, 255), (0, 65535))
_MAGIC = b"\x93NUMPY"
_MAGIC_OF_ARCHIVE = b"PK"
_BINS = 256


def read_micrograph(path: Path, threshold: float | None, is_oriented: bool) -> tuple[np.ndarray, str]:
    """Read a file, and turn grey values into two phases.

    In a picture of two values, or an array of black and white, the brighter pixels are the second phase.
    Grey values are cut at the threshold; more than eight different integers, or floats above 1, are grey
    values.

    Args:
        path: a .npy, .png or .tif file.
        threshold: the grey value above which a pixel belongs to the second phase; None for Otsu's (1979).
        is_oriented: whether the file holds rotation vectors, which stay as they are.

    Returns:
        The values, (H, W) or (D, H, W): phases 0 to n - 1 as integers, or shares from 0 to 1; or rotation
        vectors, with a last axis of 3. And a sentence about grey values that became phases, else "".

    Raises:
        DataError: the file is no picture of grey values or phases.
        One of READ_ERRORS: it cannot be read.
    """
    is_picture = path.suffix.lower() in PICTURE_SUFFIXES
    values = _read_picture(path) if is_picture else _read_array(path)
    if is_oriented or values.dtype.kind not in "buif" or not values.size:
        return values, ""
    values = _without_colours(path, values, is_picture)
    if values.dtype.kind == "f":
        is_grey = np.isfinite(values).all() and values.min() >= 0 and values.max() > 1
        return _segment(path, values, threshold) if is_grey else (values, "")
    levels = np.unique(values)
    if len(levels) == 2 and (is_picture or tuple(levels) in _BLACK_AND_WHITE):
        return (values == levels[1]).astype(np.int64), ""
    # The levels of a picture that are not 0 to n - 1 are no phases either.
    if levels[0] >= 0 and (len(levels) > _MAX_PHASES or (is_picture and levels[-1] >= len(levels))):
        return _segment(path, values, threshold)
    return values, ""


def _read_array(path: Path) -> np.ndarray:
    """Read the array of a .npy file, without unpickling: a .npy file of objects can run arbitrary code."""
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    # NumPy takes any other file for a pickle, and its error message would advise to allow pickles.
    if magic != _MAGIC and not magic.startswith(_MAGIC_OF_ARCHIVE):
        raise ValueError("it does not begin as one. Pictures end in .png, .tif or .tiff")
    values = np.load(path, allow_pickle=False)
    if not isinstance(values, np.ndarray):
        values.close()
        raise ValueError("it is an .npz archive; save the array alone with np.save")
    return values


def _read_picture(path: Path) -> np.ndarray:
    """Read all pages of a picture as (H, W), (pages, H, W), or with a last axis of colour channels."""
    with Image.open(path) as image:
        # In these modes pixels are indices into a palette or no brightness.
        if image.mode in ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV"):
            pages = [np.asarray(page.convert("RGB")) for page in ImageSequence.Iterator(image)]
        else:
            pages = [np.asarray(page) for page in ImageSequence.Iterator(image)]
    if len({page.shape for page in pages}) > 1:
        raise ValueError("its pages differ in size")
    return pages[0] if len(pages) == 1 else np.stack(pages)


def _without_colours(path: Path, values: np.ndarray, is_picture: bool) -> np.ndarray:
    """Return grey values without the axis of channels, if there is one.

    Raises:
        DataError: the channels of colour differ.
    """
    num_channels = values.shape[-1] if values.ndim in (3, 4) else 0
    # One channel, or grey and opacity.
    if num_channels == 1 or (is_picture and num_channels == 2):
        return values[..., 0]
    # No axis of channels; an array (D, H, W, 3) is refused later, with advice about orientations.
    if num_channels not in (3, 4) or (values.ndim == 4 and not is_picture):
        return values
    if (values[..., :3] == values[..., :1]).all():
        return values[..., 0]
    raise DataError(
        f"{path}: has {num_channels} channels of colour that differ. Save one of them, or phases as integers from 0"
    )


def _segment(path: Path, values: np.ndarray, threshold: float | None) -> tuple[np.ndarray, str]:
    """Divide grey values into two phases at the threshold, None for Otsu's; return them and a sentence about
    the threshold."""
    chosen = otsu_threshold(values) if threshold is None else threshold
    phases = (values > chosen).astype(np.int64)
    method = "Otsu's threshold" if threshold is None else "threshold"
    note = f"{path.name}: grey values cut at {chosen:.4g} ({method}), {phases.mean():.1%} above it"
    if not 0 < phases.mean() < 1:
        low, high = values.min(), values.max()
        raise DataError(
            f"{path}: threshold={chosen:g} does not divide its grey values from {low:g} to {high:g}"
        )
    return phases, note


def otsu_threshold(values: np.ndarray) -> float:
    """Return the threshold that leaves the least variance within the two classes (Otsu 1979), from a
    histogram of 256 bins."""
    counts, edges = np.histogram(values, _BINS)
    centres = (edges[1:] + edges[:-1]) / 2
    below = np.cumsum(counts)[:-1]
    above = counts.sum() - below
    sums = np.cumsum(counts * centres)
    mean_below, mean_above = sums[:-1] / below, (sums[-1] - sums[:-1]) / np.maximum(above, 1)
    return float(edges[1:-1][np.argmax(below * above * (mean_below - mean_above) ** 2)])
