"""Finds the masks and images that the settings name, loads or simulates them as tensors, and builds the lens,
source and resist of the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from monai.transforms import Transform
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.errors import DataError
from nbgpu.machine.files import files_below, folders_below
from nbgpu.recipes.lithography import layouts
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.imaging import Imager, abbe, socs
from nbgpu.recipes.lithography.lithobench import MASKS, find_lithobench, load_png, pixel_problems
from nbgpu.recipes.lithography.manhattan import manhattan
from nbgpu.recipes.lithography.pairs import Pair, read_npz
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.resist import Resist, in_resist
from nbgpu.recipes.lithography.sources import Source
from nbgpu.recipes.lithography.tiles import tiles_of_all

_OPTICAL_DIAMETER = 3.2
"""Width of the image of a point with its first rings, in units of wavelength / NA."""
_THRESHOLD = 0.3
_THRESHOLD_OF_LITHOBENCH = 0.225
"""The threshold that LithoBench's prints were made with, `TargetDensity` of its simulator, OpenILT."""
_HIGHEST_SCALAR_NA = 0.8


@dataclass(eq=False)
class Look(Transform):
    """A transform that reads the files of an Item to their end and raises DataError with a line for each file
    that cannot be used."""

    size: int
    pixel_nm: float

    def __call__(self, item: Item) -> dict[str, Tensor]:
        if problems := list(pixel_problems(Pair(**item), self.size, self.pixel_nm)):
            raise DataError("\n".join(problems))
        return {}


@dataclass(eq=False)
class Prepare(Transform):
    """A transform from an Item to {"mask", "aerial"}, each (1, size, size) in float32."""

    optics: Optics
    source: Source
    """How images are simulated, with the optics."""
    size: int
    """The edge of the masks with their margins, in pixels."""
    pixel_nm: float
    """The width of a pixel."""
    num_kernels: int
    """The number of SOCS kernels that images are simulated with; 0 for Abbe."""
    seed: int
    """The seed of generated masks."""
    is_in_resist: bool = False
    """Whether the image is that in the resist; by default it is the aerial one."""

    def __call__(self, item: Item) -> dict[str, Tensor]:
        """Load or generate the mask, and load or simulate its image: by Abbe's method or by SOCS, and with
        `is_in_resist` in the made-up resist."""
        mask, aerial = self.mask(item), item.get("aerial")
        if isinstance(aerial, Path):
            aerial = load_png(aerial, self.size, binary=False)
        elif aerial is None:
            aerial = cached_imager(self.optics, self.source, self.size, self.pixel_nm, self.num_kernels)(mask)
            if self.is_in_resist:
                aerial = in_resist(aerial, self.pixel_nm)
        return {"mask": mask, "aerial": aerial}

    def mask(self, item: Item) -> Tensor:
        """Return the mask of an Item, (1, size, size)."""
        mask = item.get("mask")
        if mask is None:
            return manhattan(self.size, self.pixel_nm, self.seed, item["generated"])
        if isinstance(mask, Path):
            return load_png(mask, self.size, binary=True)
        assert isinstance(mask, Tensor)
        return mask


@lru_cache(maxsize=4)
def cached_imager(optics: Optics, source: Source, size: int, pixel_nm: float, num_kernels: int) -> Imager:
    """Return an imager in complex64: SOCS with `num_kernels` kernels, or Abbe's method for 0. Imagers are
    cached, because all masks of a run share one lens."""
    imager = abbe(optics, source.points(), (size, size), pixel_nm)
    return (socs(imager, num_kernels) if num_kernels else imager).to(torch.complex64)


def build_optics(config: LithographyConfig) -> Optics:
    """Return the lens of a config."""
    return Optics(
        config.wavelength_nm,
        config.numerical_aperture,
        config.medium_index,
        config.defocus_nm,
        config.aberrations,
    )


def build_source(config: LithographyConfig) -> Source:
    """Return the illumination of a config."""
    return Source(
        config.source,
        config.sigma_inner,
        config.sigma_outer,
        config.opening_deg,
        config.source_angle_deg,
        config.source_cells,
    )


def build_resist(config: LithographyConfig) -> Resist:
    """Return the resist of a config; for LithoBench's folders, by default with LithoBench's threshold."""
    threshold = config.resist_threshold
    if threshold is None:
        threshold = _THRESHOLD_OF_LITHOBENCH if _is_lithobench(config) else _THRESHOLD
    return Resist(threshold, config.diffusion_nm)


def scalar_warning(config: LithographyConfig) -> str | None:
    """Return a warning that simulated images leave out polarisation, for a numerical aperture above 0.8; None
    below."""
    na = config.numerical_aperture
    if na <= _HIGHEST_SCALAR_NA:
        return None
    return (
        f"numerical_aperture={na:g}: images are simulated with scalar light; above NA {_HIGHEST_SCALAR_NA:g} those of "
        "a real lens depend on polarisation, which this model leaves out"
    )


def optical_diameter_nm(config: LithographyConfig) -> float:
    """Return the width in nm of the area of a mask that noticeably influences the image at a point."""
    return _OPTICAL_DIAMETER * config.wavelength_nm / config.numerical_aperture


def margin_pixels(config: LithographyConfig) -> int:
    """Return the width in pixels of the margin of the layout around each tile: an optical diameter, or half
    of a learned kernel if that is more; 0 if the data are not layouts."""
    if not _layout_paths(config):
        return 0
    return math.ceil(max(optical_diameter_nm(config), (config.kernel_nm or 0) / 2) / config.pixel)


def load_pairs(config: LithographyConfig) -> list[Pair]:
    """Return the pairs in the files of a config; only names and headers of pictures are read. Masks cut from
    layouts have the margin of `margin_pixels` on every side.

    Raises:
        DataError: a message that names every bad file.
    """
    paths = _paths(config)
    missing = [path for path in paths if not (path.is_file() or path.is_dir())]
    if missing:
        raise DataError("\n".join(f"{path}: there is no such file or folder" for path in missing))
    if layout_paths := _layout_paths(config):
        return tiles_of_all(
            layout_paths, config.layer, config.size, config.pixel, margin_pixels(config), cell=config.cell
        )
    if len(paths) == 1 and paths[0].is_dir():
        return find_lithobench(paths[0], config.size, config.pixel)
    if len(paths) == 1 and paths[0].suffix.lower() == ".npz":
        return read_npz(paths[0], config.size, config.pixel)
    raise DataError(
        f"data={config.data!r}: it takes 'generated', one .npz, a folder, or layouts ({', '.join(layouts.SUFFIXES)})"
    )


def _paths(config: LithographyConfig) -> list[Path]:
    return [Path(name.strip()).expanduser() for name in config.data.split(",")]


def _is_lithobench(config: LithographyConfig) -> bool:
    (folder, *others) = _paths(config)
    return not others and folder.is_dir() and any(path.name == MASKS for path in folders_below(folder))


def _layout_paths(config: LithographyConfig) -> list[Path]:
    """Return the layout files that the settings name; none if the data are generated, .npz, or
    LithoBench's."""
    if config.data == "generated":
        return []
    paths = _paths(config)
    if len(paths) == 1 and paths[0].is_dir():
        if _is_lithobench(config):
            return []
        return sorted(path for path in files_below(paths[0]) if path.suffix.lower() in layouts.SUFFIXES)
    return paths if {path.suffix.lower() for path in paths} <= set(layouts.SUFFIXES) else []
