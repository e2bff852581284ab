"""The shapes of volumes, read from their headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import nibabel

from nbgpu.engine.data.volumes import header_problem
from nbgpu.errors import DataError

Shape = tuple[int, int, int]


def shapes_of(paths: Iterable[Path]) -> list[Shape]:
    """Return the shapes (right, front, top) of the volumes as `load_volume` returns them.

    A file whose header is bad is left out: it is told of when the data are checked.

    Raises:
        DataError: no header is good; one line for each file.
    """
    problems = {path: header_problem(path) for path in paths}
    good = [path for path, problem in problems.items() if problem is None]
    if not good:
        raise DataError("\n".join(f"{path}: {problem}" for path, problem in problems.items()))
    return [_shape(path) for path in good]


def _shape(path: Path) -> Shape:
    image = nibabel.load(path)
    assert isinstance(image, nibabel.Nifti1Pair), "header_problem is about the others"
    shape = {
        int(axis): size
        for (axis, _), size in zip(nibabel.io_orientation(image.affine), image.shape, strict=False)
    }
    return shape[0], shape[1], shape[2]


def in_words(shape: Sequence[int]) -> str:
    """Return a shape as people write it: '240 x 240 x 155'."""
    return " x ".join(str(size) for size in shape)
