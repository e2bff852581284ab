"""The lithography recipe: a network that learns the imaging by a lens from masks and aerial images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose, Transform
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.config import LithographyConfig
from nbgpu.engine.data import inspection
from nbgpu.engine.data.augmentation import augmentation
from nbgpu.engine.data.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.data.loader import SampleLoader, hold_out
from nbgpu.engine.data.sampling import Draw
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders
from nbgpu.errors import DataError
from nbgpu.recipes.lithography import layouts
from nbgpu.recipes.lithography.contours import iou
from nbgpu.recipes.lithography.edges import Cut, edge_placement_errors_nm, stretches_nm
from nbgpu.recipes.lithography.imaging import Imager, abbe, socs
from nbgpu.recipes.lithography.lithobench import (
    find_lithobench,
    load_design,
    load_png,
    load_print,
    pixel_problems,
)
from nbgpu.recipes.lithography.manhattan import manhattan
from nbgpu.recipes.lithography.network import AerialNetwork
from nbgpu.recipes.lithography.pairs import Pair, read_npz
from nbgpu.recipes.lithography.pictures import contours_over, errors_over, row
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.resist import Resist, blurred
from nbgpu.recipes.lithography.sources import Source
from nbgpu.recipes.lithography.tiles import tiles_of_all

_MAX_IN_RESULT = 64
"""Largest number of held-out masks in the result, and of training masks for its baseline."""
_NUM_PICTURES = 6
_NUM_OVERLAYS = 4
_KERNEL_REACH = 3.2
"""Width of the learned kernels in units of wavelength / NA, which covers the image of a point with its first
rings."""


class Lithography:
    """A recipe that trains an AerialNetwork with the mean squared error.

    The data (`config.data`) are generated masks, or masks from an .npz or cut from layouts, whose images the
    imaging model simulates; or masks with images, from an .npz or from LithoBench folders. Whole masks are
    held out.
    """

    def __init__(self, config: LithographyConfig) -> None:
        self.config = config
        self.resist = Resist(config.resist_threshold, config.diffusion_nm)

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the loaders of this rank's pairs, {"mask", "aerial"} of (batch_size, 1, size, size).

        Raises:
            DataError: a line for each bad file.
        """
        config = self.config
        training, held_out = self._items()
        look = Compose([_Look(config.size, config.pixel)])
        inspection.require(config, (training + held_out)[rank::world_size], look)
        share = self._decoded(held_out[rank::world_size])
        val = [
            {name: share[name][i : i + config.batch_size] for name in share}
            for i in range(0, len(share["mask"]), config.batch_size)
        ]
        both = ("mask", "aerial")
        draw = Draw(both, augment=augmentation(config, both, (config.size, config.size)))
        return SampleLoader(
            training, self._steps(), draw, config, rank=rank, world_size=world_size, device=device
        ).loaders(val)

    def inspect(self) -> None:
        """Read all files to their end.

        Raises:
            DataError: a line for each file that cannot be used.
        """
        training, held_out = self._items()
        look = Compose([_Look(self.config.size, self.config.pixel)])
        inspection.require(self.config, training + held_out, look)

    def amount(self) -> tuple[int, int]:
        """Return (the number of training masks, 1), with one sample of each mask in an epoch. Only names and
        headers of pictures are read."""
        training, _ = self._items()
        return len(training), 1

    def _items(self) -> tuple[list[Item], list[Item]]:
        """Return (training items, held-out items)."""
        config = self.config
        if config.data == "generated":
            items: list[Item] = [{"name": f"mask {i}", "generated": i} for i in range(config.num_masks)]
        else:
            pairs = pairs_of(config)
            if len(pairs) < 2:
                raise DataError(
                    f"data={config.data!r}: has {len(pairs)} mask(s) of {config.size} x {config.size} pixels; two are needed"
                )
            items = [
                {name: value for name, value in vars(pair).items() if value is not None} for pair in pairs
            ]
        return hold_out(items, config.val_fraction, config.seed)

    def _steps(self) -> Compose:
        config = self.config
        return Compose(
            [
                _Prepare(
                    optics_of(config),
                    source_of(config),
                    config.size,
                    config.pixel,
                    config.simulated_kernels,
                    config.seed,
                )
            ]
        )

    def _decoded(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the decoded items as {"mask", "aerial"} of (N, 1, size, size), N >= 0."""
        decode = Decode(self._steps())
        decoded = [decode(item) for item in items]
        raise_together(decode.failures)
        none = torch.empty(0, 1, self.config.size, self.config.size)
        return {
            name: torch.stack([opened(one)[name] for one in decoded]) if decoded else none
            for name in ("mask", "aerial")
        }

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """Return an AerialNetwork of the configured size."""
        config = self.config
        wanted_nm = config.kernel_nm or _KERNEL_REACH * config.wavelength_nm / config.numerical_aperture
        half = min(round(wanted_nm / config.pixel) // 2, (config.size - 1) // 2)
        return AerialNetwork(config.num_kernels, 2 * half + 1, config.corrections)

    def example(self, batch_size: int) -> Batch:
        """Return a batch of masks with random pixels and of images that are blurred masks, squared."""
        shape = (batch_size, 1, self.config.size, self.config.size)
        mask = (torch.rand(shape) < 0.3).float()
        return {"mask": mask, "aerial": blurred(mask, 2.0).square()}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the kernels and, if there are any, the corrections."""
        assert isinstance(model, AerialNetwork)
        return [model.kernels] if model.corrections is None else [model.kernels, model.corrections]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, the mean squared error, and `mae`, the mean absolute error."""
        difference = at_least_float32(model(batch["mask"])) - batch["aerial"]
        return {"loss": difference.square().mean(), "mae": difference.detach().abs().mean()}

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, `mae` and the `iou` of what both images print, per sample, each of shape (N,)."""
        found = _image(model, batch["mask"])
        difference = (found - batch["aerial"]).flatten(1)
        return {
            "loss": difference.square().mean(dim=1),
            "mae": difference.abs().mean(dim=1),
            "iou": self._iou(found, batch["aerial"]).to(difference.dtype),
        }

    def _iou(self, found: Tensor, true: Tensor) -> Tensor:
        pixel_nm = self.config.pixel
        return iou(self.resist.printed(found, pixel_nm), self.resist.printed(true, pixel_nm))

    # ---- result ----

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Compare the errors on held-out masks with those of the best blur of the mask, squared. Return
        `table`, `note` and `images`.

        `edge_nm` is the mean distance between the edges that both images print, normal to the edges of the
        design, or of the mask if there is no design; `cd_nm` is the mean difference of the widths along the
        middle row.
        """
        training, held_out = self._items()
        data = self._decoded(held_out[:_MAX_IN_RESULT])
        mask, true = data["mask"], data["aerial"]
        known = held_out[:_MAX_IN_RESULT]
        design = self._designs(known, mask)
        prints = [load_print(item["printed"], self.config.size) for item in known if "printed" in item]
        if not len(mask):
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}
        batches = torch.split(mask, self.config.batch_size)
        weights_dtype = next(model.parameters()).dtype
        found = torch.cat([_image(model, batch.to(device, weights_dtype)).float().cpu() for batch in batches])
        sigma = _best_blur(self._decoded(training[:_MAX_IN_RESULT]))
        outputs = {"network": found, "mask blurred and squared": blurred(mask, sigma).square()}
        if prints:
            outputs["given images"] = true
        table = {name: self._errors(output, true, design) for name, output in outputs.items()}
        for name, output in outputs.items() if prints else ():
            mine = self.resist.printed(output, self.config.pixel)
            table[name]["printed_iou"] = round(float(iou(mine, torch.stack(prints)).mean()), 4)
        network, blur = list(table.values())[:2]
        times = blur["mse"] / max(network["mse"], 1e-12)
        verdict = (
            f"{times:.1f} times less squared error than"
            if times > 1
            else f"{1 / times:.1f} times the squared error of"
        )
        note = (
            f"On {len(mask)} held-out masks the network has {verdict} the best blur of the mask ({sigma * self.config.pixel:.0f} nm), "
            f"squared. What prints is where the image is above {self.config.resist_threshold:g}."
        )
        if prints:
            note += " printed_iou is beside the prints of the data, which is how far resist_threshold goes with them."
        return {"table": table, "note": note, "images": self._pictures(mask, true, found, design)}

    def _designs(self, items: Sequence[Item], masks: Tensor) -> Tensor:
        """Return what each mask should print: its design if the data have one, and otherwise the mask."""
        config = self.config
        designs = [
            load_design(item["design"], config.size, config.pixel) if "design" in item else mask
            for item, mask in zip(items, masks, strict=True)
        ]
        return torch.stack(designs) if designs else masks

    def _errors(self, found: Tensor, true: Tensor, design: Tensor) -> dict[str, float]:
        difference = found - true
        edges = [self._edge_errors_nm(image, design) for image in (found, true)]
        apart = (edges[0] - edges[1]).abs()
        apart = apart[~apart.isnan()]
        return {
            "mse": float(f"{float(difference.square().mean()):.3g}"),
            "mae": round(float(difference.abs().mean()), 5),
            "iou": round(float(self._iou(found, true).mean()), 4),
            "cd_nm": self._width_error_nm(found, true),
            "edge_nm": round(float(apart.mean()), 2) if len(apart) else float("nan"),
        }

    def _width_error_nm(self, found: Tensor, true: Tensor) -> float:
        """Return the mean absolute difference of the critical dimensions in nm, along those middle rows in
        which both images print the same number of stretches."""
        pixel_nm, threshold = self.config.pixel, self.resist.threshold
        middle = self.config.size * pixel_nm / 2
        cut = Cut((0.0, middle), (2 * middle, middle))
        apart = []
        for images in zip(
            *(self.resist.latent(images, pixel_nm)[:, 0] for images in (found, true)), strict=True
        ):
            widths = [np.diff(stretches_nm(image, threshold, cut, pixel_nm)) for image in images]
            if len(widths[0]) == len(widths[1]):
                apart.append(np.abs(widths[0] - widths[1]).ravel())
        differences = np.concatenate(apart) if apart else np.empty(0)
        return round(float(differences.mean()), 2) if len(differences) else float("nan")

    def _edge_errors_nm(self, images: Tensor, designs: Tensor) -> Tensor:
        latent = self.resist.latent(images, self.config.pixel)
        return torch.cat(
            [
                edge_placement_errors_nm(one[0], self.resist.threshold, design[0], self.config.pixel)
                for one, design in zip(latent, designs, strict=True)
            ]
        )

    def _pictures(self, mask: Tensor, true: Tensor, found: Tensor, design: Tensor) -> dict[str, str]:
        masks, wanted, got = (images[:_NUM_PICTURES, 0] for images in (mask, true, found))
        highest = float(wanted.max())
        latent = [self.resist.latent(images, self.config.pixel) for images in (wanted, got)]
        few = slice(_NUM_OVERLAYS)
        printed, largest_nm = errors_over(
            design[few, 0], latent[0][few], self.resist.threshold, self.config.pixel
        )
        return {
            "mask": row(masks, 1.0, "gray"),
            "aerial image": row(wanted, highest, "viridis"),
            "network": row(got, highest, "viridis"),
            "absolute error, black is 0 and white 0.05": row((got - wanted).abs(), 0.05, "gray"),
            "contours over the mask: true in blue, network in orange": contours_over(
                masks, latent[0], latent[1], self.resist.threshold
            ),
            f"what the true image prints over the design: errors at the edges, {largest_nm:.0f} nm inside in purple to "
            f"{largest_nm:.0f} nm outside in orange, and widths along the middle row in nm": printed,
        }


class _Look(Transform):
    """A transform that reads the files of an Item to their end and raises DataError with a line for each file
    that cannot be used."""

    def __init__(self, size: int, pixel_nm: float) -> None:
        self.size = size
        self.pixel_nm = pixel_nm

    def __call__(self, item: Item) -> dict[str, Tensor]:
        if problems := list(pixel_problems(Pair(**item), self.size, self.pixel_nm)):
            raise DataError("\n".join(problems))
        return {}


class _Prepare(Transform):
    """A transform from an Item to {"mask", "aerial"}, each (1, size, size) in float32."""

    def __init__(
        self, optics: Optics, source: Source, size: int, pixel_nm: float, num_kernels: int, seed: int
    ) -> None:
        self.optics = optics
        self.source = source
        self.size = size
        self.pixel_nm = pixel_nm
        self.num_kernels = num_kernels
        self.seed = seed

    def __call__(self, item: Item) -> dict[str, Tensor]:
        mask, aerial = item.get("mask"), item.get("aerial")
        if mask is None:
            mask = manhattan(self.size, self.pixel_nm, self.seed, item["generated"])
        elif isinstance(mask, Path):
            mask = load_png(mask, self.size, binary=True)
        if isinstance(aerial, Path):
            aerial = load_png(aerial, self.size, binary=False)
        elif aerial is None:
            aerial = _imager(self.optics, self.source, self.size, self.pixel_nm, self.num_kernels)(mask)
        return {"mask": mask, "aerial": aerial}


def optics_of(config: LithographyConfig) -> Optics:
    """Return the lens of a config."""
    return Optics(
        config.wavelength_nm,
        config.numerical_aperture,
        config.medium_index,
        config.defocus_nm,
        config.aberrations,
    )


def source_of(config: LithographyConfig) -> Source:
    """Return the illumination of a config."""
    return Source(
        config.source,
        config.sigma_inner,
        config.sigma_outer,
        config.opening_deg,
        config.source_angle_deg,
        config.source_cells,
    )


@lru_cache(maxsize=4)
def _imager(optics: Optics, source: Source, size: int, pixel_nm: float, num_kernels: int) -> Imager:
    imager = abbe(optics, source.points(), (size, size), pixel_nm)
    return (socs(imager, num_kernels) if num_kernels else imager).to(torch.complex64)


def pairs_of(config: LithographyConfig) -> list[Pair]:
    """Return the pairs in the files of a config; only names and headers of pictures are read.

    Raises:
        DataError: a message that names every bad file.
    """
    paths = [Path(name.strip()).expanduser() for name in config.data.split(",")]
    missing = [path for path in paths if not (path.is_file() or path.is_dir())]
    if missing:
        raise DataError("\n".join(f"{path}: there is no such file or folder" for path in missing))
    suffixes = {path.suffix.lower() for path in paths}
    if len(paths) == 1 and paths[0].is_dir():
        drawn = sorted(p for p in paths[0].rglob("*") if p.suffix.lower() in layouts.SUFFIXES and p.is_file())
        is_lithobench = any(path.is_dir() for path in paths[0].rglob("pixelILT"))
        if drawn and not is_lithobench:
            return tiles_of_all(drawn, config.layer, config.size, config.pixel)
        return find_lithobench(paths[0], config.size, config.pixel)
    if suffixes == {".npz"} and len(paths) == 1:
        return read_npz(paths[0], config.size, config.pixel)
    if suffixes <= set(layouts.SUFFIXES):
        return tiles_of_all(paths, config.layer, config.size, config.pixel)
    raise DataError(
        f"data={config.data!r}: it takes 'generated', one .npz, a folder, or layouts ({', '.join(layouts.SUFFIXES)})"
    )


@torch.no_grad()
def _image(model: nn.Module, mask: Tensor) -> Tensor:
    network = model.module if isinstance(model, DistributedDataParallel) else model
    return at_least_float32(network(mask))


def _best_blur(data: dict[str, Tensor]) -> float:
    """Return the blur, in pixels, with which the squared blurred masks come closest to the images of the
    training masks."""
    sigmas = np.arange(0.5, 6.0, 0.1)
    errors = [float((blurred(data["mask"], s).square() - data["aerial"]).square().mean()) for s in sigmas]
    return float(sigmas[int(np.argmin(errors))])
