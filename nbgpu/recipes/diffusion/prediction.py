"""Writes the predicted modality of new cases as NIfTI, on the grid of the given modalities."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.volumes import save_like
from nbgpu.engine.workload.recipe import Predicted
from nbgpu.recipes.diffusion.files import Case, Cube, Modality, file_ending

_NUM_GENERATED = 8


def write_prediction(
    case: Case, given: Mapping[str, Modality], target: str, cube: Cube, image: Tensor, stem: Path
) -> Predicted:
    """Write the predicted modality of a case as NIfTI, on the grid of the first given modality's file.

    Intensities of MRI have no absolute scale, so that the scale of the given modalities is used: -1 becomes
    the mean of their 1st percentiles (the column `low`), and 1 the mean of their 99th (`high`). Voxels that
    are 0 in all given modalities become 0, and so do voxels of the brain outside the cube, whose share is the
    column `brain_outside`.

    Args:
        case: the case.
        given: its other modalities.
        target: the predicted modality.
        cube: the place of the cube in the volume.
        image: the predicted cube, (1, e, e, e) from -1 to 1.
        stem: the path of the file, up to the modality.
    """
    low, high = (sum(ends) / len(given) for ends in zip(*(m.limits for m in given.values()), strict=True))
    brain = torch.stack([modality.is_brain for modality in given.values()]).any(dim=0)
    covered = cube.placed(torch.ones_like(image), 0.0) > 0
    intensities = (cube.placed(image, -1.0).clamp(-1, 1) + 1) / 2 * (high - low) + low
    path = stem.with_name(stem.name + file_ending(case, target))
    save_like(torch.where(brain & covered, intensities, 0.0), case.files[next(iter(given))], path)
    values = {"low": round(low, 4), "high": round(high, 4)}
    if outside := float((brain & ~covered).sum() / brain.sum()):
        values["brain_outside"] = round(outside, 4)
    return Predicted(values, [path])


def write_generated(target: str, image: Tensor, stem: Path) -> Predicted:
    """Write the predicted modality of a generated head, (1, e, e, e) from -1 to 1, as NIfTI with these
    values."""
    path = stem.with_name(f"{stem.name}-{target}.nii.gz")
    save_like(image, None, path)
    return Predicted({}, [path])


def noise_number(name: str) -> int:
    """Return a number for the noise of a case that follows from its name alone, so that it does not depend on
    the other cases in the folder."""
    return zlib.crc32(name.encode())


def new_heads(num_known: int) -> list[Item]:
    """Return generated heads that a run with `num_known` generated heads has not seen."""
    return [
        {"name": f"head {number}", "generated": number}
        for number in range(num_known, num_known + _NUM_GENERATED)
    ]
