"""Reads microstructures from files as fields, with all checks, and writes fields as VTK files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS
from nbgpu.recipes.microstructure.grids import indicated
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.micrographs import PICTURE_SUFFIXES, READ_ERRORS, read_micrograph


def data_paths(data: str) -> list[Path]:
    """Return the files that the `data` setting names: one, or three separated by commas, one for each
    direction."""
    return [Path(name.strip()).expanduser() for name in data.split(",")]


def load_fields(
    data: str, names: Sequence[str], measure: Measure, multiphase: bool, threshold: float | None
) -> tuple[list[Tensor], list[str]]:
    """Load the field of one file, or those of three pictures perpendicular to the three directions.

    A file holds phases 0 to n - 1 as integers, the share of the second phase as floats from 0 to 1, or grey
    values, see `read_micrograph`. If the OrientationDescriptor is measured, the last axis has length 3 and
    holds rotation vectors in radians, as floats.

    Args:
        data: see `data_paths`.
        names: the descriptors to be measured.
        measure: the parameters of the descriptors.
        multiphase: whether a field has one channel for each phase; otherwise it has one, for the second of
            two phases.
        threshold: the grey value above which a pixel belongs to the second phase; None for Otsu's.

    Returns:
        Fields (P, H, W) or (P, D, H, W) in float64, and a sentence for each file of grey values.

    Raises:
        DataError: lists every problem of all the files, one per line.
    """
    paths = data_paths(data)
    problems: list[str] = []
    fields: list[Tensor] = []
    notes: list[str] = []
    if len(paths) not in (1, 3):
        problems.append(
            f"data={data!r} names {len(paths)} files; it takes one, or three pictures, one for each direction"
        )
    is_oriented = any(DESCRIPTORS[name].of == "orientations" for name in names)
    for path in paths:
        try:
            values, note = read_micrograph(path, threshold, is_oriented)
        except DataError as error:
            problems.append(str(error))
            continue
        except READ_ERRORS as error:
            kind = "picture" if path.suffix.lower() in PICTURE_SUFFIXES else ".npy file of numbers"
            problems.append(f"{path}: cannot be read as a {kind}: {error}")
            continue
        notes += [note] if note else []
        if file_problems := list(_problems(values, measure, multiphase, is_oriented)):
            problems += [f"{path}: {problem}" for problem in file_problems]
        else:
            fields.append(_as_field(values, multiphase, is_oriented))
    kinds = {(len(field), field.ndim) for field in fields}
    if not problems and len(fields) == 3 and (len(kinds) > 1 or fields[0].ndim != 3):
        shapes = ", ".join("x".join(map(str, field.shape[1:])) for field in fields)
        problems.append(
            f"data={data!r}: three files must be pictures with the same number of phases; they are {shapes}"
        )
    if problems:
        raise DataError("\n".join(problems))
    return fields, notes


def _problems(values: np.ndarray, measure: Measure, multiphase: bool, is_oriented: bool) -> Iterator[str]:
    """Yield a message for each reason why the array of a file cannot be measured: its type, its shape, or its
    values. The arguments are those of `load_fields` and `_as_field`."""
    shape = values.shape[:-1] if is_oriented else values.shape
    if values.dtype.kind not in "buif":
        yield f"holds {values.dtype}; it takes integers (phases 0 to n - 1) or floats from 0 to 1"
        return
    if is_oriented and (values.shape[-1:] != (3,) or values.dtype.kind != "f"):
        yield f"holds no rotation vectors for the OrientationDescriptor: floats with a last axis of 3, not {_format_values(values)}"
        return
    if len(shape) not in (2, 3):
        more = ". A last axis of 3 is for orientations" if values.ndim == 4 and values.shape[-1] == 3 else ""
        yield f"has {_format_values(values)}; it takes (H, W) or (D, H, W){more}"
        return
    if min(shape) < 2 * measure.limit_to:
        yield (
            f"has {_format_values(values)}, and each axis needs at least 2 x limit_to = {2 * measure.limit_to} pixels. Lower "
            "limit_to"
        )
    if not values.size:
        return
    if values.dtype.kind != "f":
        yield from _phase_problems(values, multiphase)
    elif not np.isfinite(values).all():
        yield f"holds {int((~np.isfinite(values)).sum())} values that are NaN or infinite"
    elif not is_oriented:
        yield from _share_problems(values, multiphase)


def _share_problems(values: np.ndarray, multiphase: bool) -> Iterator[str]:
    """Yield a message if floats are not shares from 0 to 1, or are shares where the settings need phases.

    Grey values, which are floats from 0 to above 1, were made phases by `read_micrograph` before.
    """
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        yield f"holds floats from {low:g} to {high:g}; they must be shares from 0 to 1, or grey values of 0 and more"
    elif multiphase and not np.isin(values, (0.0, 1.0)).all():
        yield "holds shares of one phase, and multiphase=True takes phases as integers"


def _phase_problems(values: np.ndarray, multiphase: bool) -> Iterator[str]:
    """Yield a message if integers are not phases 0 to n - 1 without gaps, or their number does not fit the
    settings."""
    present = np.unique(values)
    if present[0] < 0:
        yield f"holds negative phases: {present[0]}"
    elif missing := sorted(set(range(int(present[-1]) + 1)) - set(present.tolist()))[:5]:
        kind = f"{len(present)} values to {present[-1]}"
        yield f"holds {kind}, and phases must be 0 to n - 1 without gaps; missing: {', '.join(map(str, missing))}"
    elif len(present) == 1:
        yield "holds one phase only, which has no structure"
    elif len(present) > 2 and not multiphase:
        yield f"holds {len(present)} phases, which needs multiphase=True"


def _format_values(values: np.ndarray) -> str:
    return f"the shape {values.shape} of {values.dtype}"


def _as_field(values: np.ndarray, multiphase: bool, is_oriented: bool) -> Tensor:
    """Return an array as a field (P, *shape) in float64.

    With `is_oriented`, rotation vectors (*shape, 3) become three channels. Floats without `multiphase` are
    the share of phase 1, and P = 1. Otherwise the values are phases: with `multiphase` the field has the
    indicator function of each of P phases, without it that of phase 1 alone.
    """
    if is_oriented:
        return torch.from_numpy(values.astype(np.float64)).movedim(-1, 0)
    if values.dtype.kind == "f" and not multiphase:
        return torch.from_numpy(values.astype(np.float64))[None]
    phases = torch.from_numpy(values.astype(np.int64))
    return indicated(phases, int(phases.max()) + 1 if multiphase else 1)


def write_vtk(path: Path, phases: Tensor, field: Tensor | None = None) -> None:
    """Write a legacy binary VTK file of structured points, which ParaView and VTK read.

    Args:
        path: the file to write.
        phases: the phase of each pixel, (H, W) or (D, H, W), written as the scalars `phase`. The last axis is
            x.
        field: (P, *shape), written as the scalars `share_0`, `share_1`, ... in double precision.
    """
    shape = tuple(phases.shape)
    sizes = [*reversed(shape), *(1,) * (3 - len(shape))]
    header = (
        "# vtk DataFile Version 3.0\nnbgpu microstructure\nBINARY\nDATASET STRUCTURED_POINTS\n"
        f"DIMENSIONS {' '.join(map(str, sizes))}\nORIGIN 0 0 0\nSPACING 1 1 1\nPOINT_DATA {phases.numel()}\n"
    )
    # x varies fastest in VTK, as the last axis does in memory; numbers are big-endian.
    with path.open("wb") as file:
        file.write(header.encode())
        file.write(b"SCALARS phase int 1\nLOOKUP_TABLE default\n")
        file.write(phases.cpu().numpy().astype(">i4").tobytes() + b"\n")
        for index, share in enumerate(field if field is not None else ()):
            file.write(f"SCALARS share_{index} double 1\nLOOKUP_TABLE default\n".encode())
            file.write(share.cpu().numpy().astype(">f8").tobytes() + b"\n")
