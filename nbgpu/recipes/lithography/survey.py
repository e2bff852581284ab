"""The process window of a mask, from the command line; ranks divide its conditions among them.

    python -m nbgpu.recipes.lithography.survey --data chip.gds --layer 11/0 --pixel-nm 25
    torchrun --nproc-per-node=4 -m nbgpu.recipes.lithography.survey --data chip.gds --layer 11/0 --pixel-nm 25

The flags are the recipe's settings of masks, lens, source and resist, and those of `SurveyConfig`. The
command writes window.csv and window.png.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from nbgpu.config import TrainConfig, flags
from nbgpu.config.settings import Settings
from nbgpu.engine.group import exchange
from nbgpu.errors import ConfigError, NbgpuError
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.lithobench import load_design, load_png
from nbgpu.recipes.lithography.manhattan import manhattan
from nbgpu.recipes.lithography.samples import (
    build_optics,
    build_resist,
    build_source,
    load_pairs,
    margin_pixels,
    scalar_warning,
)
from nbgpu.recipes.lithography.window import ProcessCondition, conditions, process_window, pv_band_nm2

_TRAINING_SETTINGS = {
    *("recipe", "steps", "batch_size", "num_kernels", "kernel_nm", "corrections", "simulated_kernels")
}
"""Settings of the recipe, besides those of all recipes, that a survey does not use."""
_CSV, _PICTURE = "window.csv", "window.png"


class SurveyConfig(Settings):
    """Settings of a survey of one mask's print over a range of dose and focus."""

    doses: tuple[float, ...] = Field(
        (0.9, 0.95, 1.0, 1.05, 1.1), min_length=1, description="in units of the nominal dose"
    )
    defocuses_nm: tuple[float, ...] = Field(
        (-100.0, -50.0, 0.0, 50.0, 100.0), min_length=1, description="beside defocus_nm, in nm"
    )
    mask: int = Field(0, ge=0, description="number of the mask or tile in the data, counted from 0")
    cut_row: int | None = Field(
        None, ge=0, description="row of pixels along which the width is measured; left out: the middle one"
    )
    out: str = Field(".", min_length=1, description="folder that gets window.csv and window.png")

    def problems(self) -> Iterator[str]:
        if min(self.doses) <= 0:
            yield f"doses={self.doses} must all be above 0"


def survey(
    config: LithographyConfig, asked: SurveyConfig, rank: int = 0, world_size: int = 1
) -> list[ProcessCondition]:
    """Evaluate this rank's share of the conditions of dose and focus.

    A share is contiguous, so that conditions with the same focus share one aerial image.

    Raises:
        ConfigError: the mask or the row does not exist.
        DataError: everything that is wrong with the data.
    """
    mask, design = _mask(config, asked.mask)
    if asked.cut_row is not None and asked.cut_row >= config.size:
        raise ConfigError(f"cut_row={asked.cut_row}: the mask has rows 0 to {config.size - 1}")
    every = conditions(asked.doses, asked.defocuses_nm)
    share = np.array_split(np.arange(len(every)), world_size)[rank]
    return process_window(
        mask.double(),
        design,
        build_optics(config),
        build_source(config),
        build_resist(config),
        config.pixel,
        [every[i] for i in share],
        cut_row=asked.cut_row,
        margin=margin_pixels(config),
    )


def band_nm2(config: LithographyConfig, asked: SurveyConfig) -> float:
    """Return the area of the process variation band of the mask in nm^2: the area that prints at one of the
    contest's two corners of dose and focus and not at the other.

    Raises:
        ConfigError: the mask does not exist.
        DataError: everything that is wrong with the data.
    """
    mask, _ = _mask(config, asked.mask)
    return pv_band_nm2(
        mask.double(),
        build_optics(config),
        build_source(config),
        build_resist(config),
        config.pixel,
        margin=margin_pixels(config),
    )


def _mask(config: LithographyConfig, number: int) -> tuple[Tensor, Tensor]:
    """Return (mask, design), each (H, W) with the margins; the mask is its own design if the data have
    none."""
    if config.data == "generated":
        mask = manhattan(config.size, config.pixel, config.split_seed, number)[0]
        return mask, mask
    pairs = load_pairs(config)
    if number >= len(pairs):
        raise ConfigError(f"mask={number}: {config.data} has masks 0 to {len(pairs) - 1}")
    pair = pairs[number]
    mask = pair.mask[0] if isinstance(pair.mask, Tensor) else load_png(pair.mask, config.size, binary=True)[0]
    return mask, mask if pair.design is None else load_design(pair.design, config.size, config.pixel)[0]


def write(found: Sequence[ProcessCondition], folder: Path) -> None:
    """Write window.csv, with a line for each condition, and window.png. Lengths are in nm."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(ProcessCondition)])
        writer.writeheader()
        writer.writerows(asdict(condition) for condition in found)
    _draw(found, folder / _PICTURE)


def _draw(found: Sequence[ProcessCondition], path: Path) -> None:
    """Plot the widths over focus, with a line for each dose, and the edge placement errors over focus and
    dose, with the number of lost edges in each cell."""
    by_condition = {(condition.dose, condition.defocus_nm): condition for condition in found}
    doses, foci = (sorted(set(values)) for values in zip(*by_condition, strict=True))
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    widths, errors = figure.subplots(1, 2)
    for dose in doses:
        widths.plot(foci, [by_condition[dose, focus].cd_nm for focus in foci], "o-", label=f"dose {dose:g}")
    widths.set(xlabel="defocus, nm", ylabel="width, nm")
    widths.legend()
    epe_nm = np.array([[by_condition[dose, focus].mean_epe_nm for focus in foci] for dose in doses])
    figure.colorbar(errors.imshow(epe_nm, origin="lower", aspect="auto", cmap="viridis"), ax=errors)
    errors.set_xticks(range(len(foci)), [f"{focus:g}" for focus in foci])
    errors.set_yticks(range(len(doses)), [f"{dose:g}" for dose in doses])
    title = "mean edge placement error, nm, and edges with no contour"
    errors.set(title=title, xlabel="defocus, nm", ylabel="dose")
    for row, column in np.ndindex(epe_nm.shape):
        num_lost = by_condition[doses[row], foci[column]].num_lost
        errors.text(column, row, str(num_lost), ha="center", va="center", color="white")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the flags, evaluate this rank's share of the conditions, and write the results of all ranks on
    rank 0. Several ranks are those that torchrun has started."""
    rank, world_size = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    hidden = {*TrainConfig.model_fields, *_TRAINING_SETTINGS} - {"data", "seed"}
    values = flags.parse(
        [LithographyConfig, SurveyConfig],
        sys.argv[1:] if arguments is None else arguments,
        prog="python -m nbgpu.recipes.lithography.survey",
        hidden=tuple(hidden),
    )
    survey_values = {name: values.pop(name) for name in SurveyConfig.model_fields}
    try:
        asked, config = SurveyConfig.checked(**survey_values), LithographyConfig.checked(**values)
        found = survey(config, asked, rank, world_size)
    except NbgpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if world_size > 1:
        # In a notebook the process group exists already, and must stay.
        needs_group = not dist.is_initialized()
        if needs_group:
            dist.init_process_group("gloo")
        parts = exchange.gather([asdict(condition) for condition in found])
        found = [ProcessCondition(**values) for part in parts for values in part]
        if needs_group:
            dist.destroy_process_group()
    if rank == 0:
        write(found, Path(asked.out).expanduser())
        sys.stdout.write(f"{len(found)} conditions: {Path(asked.out) / _CSV}, {Path(asked.out) / _PICTURE}\n")
        sys.stdout.write(
            f"process variation band: {band_nm2(config, asked):.0f} nm^2, between dose 1.02 in focus and dose 0.98 at "
            "25 nm of defocus (ICCAD 2013)\n"
        )
        if warning := scalar_warning(config):
            sys.stderr.write(f"{warning}\n")


if __name__ == "__main__":
    main()
