"""The shapes of volumes, read from their headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from nbgpu.engine.data.spacing import affine_of, resampled_grid, shape_of
from nbgpu.engine.data.volumes import header_problem
from nbgpu.errors import DataError

Shape = tuple[int, int, int]


def shapes_of(
    paths: Iterable[Path], *, spacing_mm: Sequence[float] = (), channels: Sequence[int] | None = None
) -> list[Shape]:
    """Return the shapes (right, front, top) of the volumes as a recipe reads them.

    A file whose header is bad is left out: it is told of when the data are checked.

    Args:
        paths: the files.
        spacing_mm, channels: as `header_problem` takes them.

    Raises:
        DataError: no header is good; one line for each file.
    """
    problems = {path: header_problem(path, spacing_mm=spacing_mm, channels=channels) for path in paths}
    good = [path for path, problem in problems.items() if problem is None]
    if not good:
        raise DataError("\n".join(f"{path}: {problem}" for path, problem in problems.items()))
    if not spacing_mm:
        return [shape_of(path) for path in good]
    return [resampled_grid(shape_of(path), affine_of(path), spacing_mm)[0] for path in good]


def in_words(shape: Sequence[float]) -> str:
    """Return a shape or voxel size as people write it: '240 x 240 x 155'."""
    return " x ".join(f"{size:g}" for size in shape)
