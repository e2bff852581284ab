"""The lithography recipe: a network that learns the imaging by a lens from masks and aerial images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.data import inspection
from nbgpu.engine.data.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.data.loader import SampleLoader
from nbgpu.engine.data.parts import Parts, split
from nbgpu.engine.data.sampling import Draw, augmentation
from nbgpu.engine.data.volumes import READ_ERRORS, first_line
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders, Predicted
from nbgpu.errors import DataError
from nbgpu.planning.epochs import DataAmount
from nbgpu.recipes import verdict
from nbgpu.recipes.lithography import prediction
from nbgpu.recipes.lithography.baselines import (
    COMPACT_RESIST,
    best_blur,
    fitted_resists,
    num_compact_terms,
    num_systems,
    socs_images,
)
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.contours import iou
from nbgpu.recipes.lithography.lithobench import load_design, load_print
from nbgpu.recipes.lithography.measures import Measures, Reference
from nbgpu.recipes.lithography.network import AerialNetwork
from nbgpu.recipes.lithography.overlay import draw_contours, draw_errors, row
from nbgpu.recipes.lithography.pairs import Pair
from nbgpu.recipes.lithography.resist import blurred
from nbgpu.recipes.lithography.samples import (
    Look,
    Prepare,
    build_optics,
    build_resist,
    build_source,
    load_pairs,
    margin_pixels,
    optical_diameter_nm,
    scalar_warning,
)
from nbgpu.recipes.lithography.tiles import distinct
from nbgpu.recipes.side_by_side import Colours, Grid
from nbgpu.run_folder.predictions import Job, Row

_MAX_IN_RESULT = 64
"""Largest number of held-out masks in the result, and of training masks to which baselines are fitted."""
_NUM_PICTURES = 6
_NUM_NEW = 8
_NUM_OVERLAYS = 4
_BLUR = "mask blurred and squared"


class Lithography:
    """A recipe that trains an AerialNetwork with the mean squared error.

    The data (`config.data`) are masks without images, which are generated, cut from layouts or read from an
    .npz, and whose images the imaging model simulates; or masks with images, from an .npz or from LithoBench
    folders. Whole masks are held out. Masks of layouts have a margin, which counts neither in the loss nor in
    any measure.
    """

    def __init__(self, config: LithographyConfig) -> None:
        self.config = config
        self.resist = build_resist(config)
        self._num_repeated = 0
        """The number of masks that equal another one and were left out; counted by `_parts`."""
        self._prediction_recipe = self
        """The recipe with the settings of a prediction's data, whose margins may differ from the run's."""

    @cached_property
    def measures(self) -> Measures:
        """The measures of images, for the settings' resist, pixel size and margin."""
        return Measures(self.resist, self.config.pixel, margin_pixels(self.config))

    @property
    def _learns_resist(self) -> bool:
        return self.config.image == "resist"

    @property
    def _field(self) -> int:
        """The edge of a mask with its margins, in pixels."""
        return self.config.size + 2 * self.measures.margin

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the loaders of this rank's pairs, {"mask", "aerial"} of (batch_size, 1, size, size), or
        larger by twice the margin.

        Raises:
            DataError: a line for each bad file.
        """
        config = self.config
        parts = self._parts()
        look = Compose([Look(config.size, config.pixel)])
        inspection.require(config, parts.everything[rank::world_size], look)
        share = parts.validation[rank::world_size]
        held_out = self._decoded(share[: config.num_evaluated(len(share))])
        val = [
            {name: held_out[name][i : i + config.batch_size] for name in held_out}
            for i in range(0, len(held_out["mask"]), config.batch_size)
        ]
        both = ("mask", "aerial")
        draw = Draw(both, augment=augmentation(config, both, (self._field, self._field)))
        loaders = SampleLoader(
            parts, self._steps(), draw, config, rank=rank, world_size=world_size, device=device
        ).loaders(val)
        return replace(loaders, warnings=(*loaders.warnings, *self._warnings(parts.training)))

    def _warnings(self, items: Sequence[Item]) -> Iterator[str]:
        """Yield a warning if the simulation of images is inexact, and one if masks were left out."""
        if "aerial" not in items[0] and (warning := scalar_warning(self.config)) is not None:
            yield warning
        if self._num_repeated:
            yield (
                f"{self._num_repeated} mask(s) repeat another one and were left out: they would be in training and held "
                "out at the same time"
            )

    def inspect(self) -> None:
        """Read all files to their end.

        Raises:
            DataError: a line for each file that cannot be used.
        """
        look = Compose([Look(self.config.size, self.config.pixel)])
        inspection.require(self.config, self._parts().everything, look)

    def amount(self) -> DataAmount:
        """Return the numbers of masks; a mask gives one sample in an epoch. Only names and headers of
        pictures are read."""
        return self._parts().amount()

    def _parts(self) -> Parts:
        """Divide the masks into training, validation and test part, with tiles of one region of a layout in
        the same part. Masks that equal another one are left out and counted in `_num_repeated`."""
        config = self.config
        if config.data == "generated":
            items: list[Item] = [{"name": f"mask {i}", "generated": i} for i in range(config.num_masks)]
        else:
            all_pairs = load_pairs(config)
            pairs = distinct(all_pairs, self.measures.margin)
            self._num_repeated = len(all_pairs) - len(pairs)
            if self._learns_resist and any(pair.aerial is not None for pair in pairs):
                raise DataError(
                    f"data={config.data!r}: has images, and image='resist' is only for those that are simulated. Leave it out: "
                    "the network learns the images that are given"
                )
            if len(pairs) < 2:
                raise DataError(
                    f"data={config.data!r}: has {len(pairs)} different mask(s) of {config.size} x {config.size} pixels; two "
                    "are needed"
                )
            items = [_item(pair) for pair in pairs]
        # Tiles of one region stay together, unless there is only one region: nothing could be held out.
        regions = {item.get("region", item["name"]) for item in items}
        key = "region" if len(regions) > 1 else "name"
        return split(items, config, lambda item: item.get(key, item["name"]))

    def _steps(self) -> Compose:
        """Return the transform from an Item to its mask and image, which it simulates if the data have
        none."""
        config = self.config
        return Compose(
            [
                Prepare(
                    build_optics(config),
                    build_source(config),
                    self._field,
                    config.pixel,
                    config.simulated_kernels,
                    config.split_seed,
                    self._learns_resist,
                )
            ]
        )

    def _decoded(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the decoded items as {"mask", "aerial"} of (N, 1, H, W), N >= 0."""
        decode = Decode(self._steps())
        decoded = [decode(item) for item in items]
        raise_together(decode.failures)
        none = torch.empty(0, 1, self._field, self._field)
        return {
            name: torch.stack([opened(one)[name] for one in decoded]) if decoded else none
            for name in ("mask", "aerial")
        }

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """Return an AerialNetwork of the configured size."""
        return AerialNetwork(self.config.num_kernels, self._kernel_size, self.config.corrections)

    @property
    def _kernel_size(self) -> int:
        """The width of the learned kernels in pixels."""
        wanted_nm = self.config.kernel_nm or optical_diameter_nm(self.config)
        return 2 * min(round(wanted_nm / self.config.pixel) // 2, (self._field - 1) // 2) + 1

    def example(self, batch_size: int) -> Batch:
        """Return a batch of masks with random pixels and of images that are blurred masks, squared."""
        shape = (batch_size, 1, self._field, self._field)
        mask = (torch.rand(shape) < 0.3).float()
        return {"mask": mask, "aerial": blurred(mask, 2.0).square()}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the kernels and, if there are any, the corrections."""
        assert isinstance(model, AerialNetwork)
        return [model.kernels] if model.corrections is None else [model.kernels, model.corrections]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, the mean squared error, and `mae`, the mean absolute error."""
        difference = self.measures.inner(at_least_float32(model(batch["mask"])) - batch["aerial"])
        return {"loss": difference.square().mean(), "mae": difference.detach().abs().mean()}

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, `mae`, and the `iou` of the printed patterns of both images, per sample, each of
        shape (N,)."""
        found = _image(model, batch["mask"])
        difference = self.measures.inner(found - batch["aerial"]).flatten(1)
        return {
            "loss": difference.square().mean(dim=1),
            "mae": difference.abs().mean(dim=1),
            "iou": self.measures.iou(found, batch["aerial"]).to(difference.dtype),
        }

    # ---- result ----

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Compare the network on held-out masks with baselines: the best blur of the mask, squared; where
        images are simulated, SOCS with as many kernels as the network has; and for images in a resist, SOCS
        followed by fitted models of the resist.

        Return `table`, whose columns are those of `Measures.errors`, `note` and `images`.
        """
        config, measures = self.config, self.measures
        parts = self._parts()
        max_masks = config.num_evaluated(_MAX_IN_RESULT)
        training, held_out = parts.training[:max_masks], parts.reported[:max_masks]
        data = self._decoded(held_out)
        mask, true = data["mask"], data["aerial"]
        if not len(mask):
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}

        # The images of the network and of the baselines.
        batches = torch.split(mask, config.batch_size)
        dtype = next(model.parameters()).dtype
        found = torch.cat([_image(model, batch.to(device, dtype)).float().cpu() for batch in batches])
        fitted = self._decoded(training)
        sigma = best_blur(fitted["mask"], fitted["aerial"])
        outputs = {"network": found, _BLUR: blurred(mask, sigma).square()}
        is_simulated = "aerial" not in held_out[0]
        num_socs = num_systems(config)
        if is_simulated and self._learns_resist:
            fitted_aerials, aerials = (socs_images(config, masks) for masks in (fitted["mask"], mask))
            outputs |= fitted_resists(fitted_aerials, fitted["aerial"], aerials, config.pixel, measures.inner)
        elif is_simulated:
            outputs[f"SOCS, {num_socs} kernels"] = socs_images(config, mask)
        # The true images get a row as well: their errors are 0, and their violations and dose band are those
        # of a perfect network.
        outputs["simulated images" if is_simulated else "given images"] = true

        # The table.
        design = self._designs(held_out, mask)
        reference = measures.reference(true, design)
        table = {name: measures.errors(output, reference) for name, output in outputs.items()}
        prints = [load_print(item["printed"], config.size) for item in held_out if "printed" in item]
        for name, output in outputs.items() if prints else ():
            printed_iou = iou(measures.printed(output), torch.stack(prints))
            table[name]["printed_iou"] = round(float(printed_iou.mean()), 4)

        # The note, which compares the network with the best baseline that has to learn.
        other = COMPACT_RESIST if COMPACT_RESIST in table else _BLUR
        mse = [
            measures.inner(outputs[name] - true).square().flatten(1).mean(dim=1).double().numpy()
            for name in ("network", other)
        ]
        few = verdict.too_few(len(mask), "masks")
        compares = f"is compared with, in the table ({few})," if few else f"has {_compare_errors(*mse)}"
        note = f"On {len(mask)} held-out masks the network {compares} "
        if other == COMPACT_RESIST:
            note += (
                f"SOCS with a compact model of the resist: {num_socs} kernels of the lens, which it knows, and "
                f"{num_compact_terms()} weights fitted to {len(fitted['mask'])} training masks. "
            )
        else:
            note += f"the best blur of the mask ({sigma * config.pixel:.0f} nm), squared. "
        note += self._explain_columns(reference)
        if is_simulated and not self._learns_resist:
            note += (
                f" SOCS knows the lens: its {num_socs} complex kernels have as many numbers for each pixel as "
                f"{config.num_kernels} learned ones."
            )
        if prints:
            note += " printed_iou is beside the prints of the data, which is how far resist_threshold goes with them."
        note += parts.in_words(config)
        return {"table": table, "note": note, "images": self._pictures(mask, true, found, design)}

    # ---- new data ----

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return the masks that `data` names, including those that equal another one.

        Raises:
            DataError: files are bad, or the masks are smaller than the network's kernels.
        """
        config = self.config
        self._prediction_recipe = new = Lithography(config.counting(data=data))
        if self._kernel_size > new._field:
            raise DataError(
                f"{data}: the network's kernels have {self._kernel_size} pixels, and the masks with their margins {new._field}. "
                "The network was trained on masks with margins, as layouts have them: give it layouts"
            )
        if data == "generated":
            numbers = range(config.num_masks, config.num_masks + _NUM_NEW)
            return [{"name": f"mask {number}", "generated": number} for number in numbers], []
        return [_item(pair) for pair in load_pairs(new.config)], []

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Write the network's image of a mask, the polygons that the image prints, and a picture of both.

        Columns: `printed_share` of the area and, where the true image is known, `mse` and the `iou` of the
        two printed areas.
        """
        new = self._prediction_recipe
        (prepare,) = new._steps().flatten().transforms
        assert isinstance(prepare, Prepare)
        is_known = "aerial" in sample or "generated" in sample
        try:
            prepared = prepare(sample) if is_known else {"mask": prepare.mask(sample)}
        except READ_ERRORS as error:
            raise DataError(f"{sample['name']}: cannot be read: {first_line(error)}") from None
        mask = prepared["mask"][None]
        dtype = next(model.parameters()).dtype
        found = _image(model, mask.to(device, dtype)).float().cpu()
        inner, pixel_nm, threshold = new.measures.inner, new.config.pixel, new.resist.threshold
        latent = inner(new.resist.latent(found, pixel_nm))[0, 0]
        image, origin_nm = inner(found)[0, 0], sample.get("origin_nm", (0.0, 0.0))
        paths = [
            prediction.write_image(image, stem, new.config.image),
            prediction.write_contours(latent, threshold, pixel_nm, origin_nm, stem),
            prediction.write_picture(inner(mask)[0, 0], image, latent, threshold, self.config.pixel, stem),
        ]
        values = {"printed_share": round(float((latent > threshold).double().mean()), 5)}
        if is_known:
            true = prepared["aerial"][None]
            values["mse"] = float(f"{inner(found - true).square().mean():.4g}")
            values["iou"] = round(float(new.measures.iou(found, true)[0]), 4)
        return Predicted(values, paths, {"layout": str(sample.get("layout", ""))})

    def reference_samples(self) -> Sequence[Item]:
        """Return none: the image of a mask does not depend on other masks."""
        return []

    def conclude(
        self, rows: Sequence[Row], references: Sequence[Row], job: Job
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Write the contours of layouts into one GDSII file."""
        return {}, prediction.write_gds(rows, job)

    def _designs(self, items: Sequence[Item], masks: Tensor) -> Tensor:
        """Return the design of each mask, (N, 1, H, W) for N > 0: that of the data, or the mask itself if the
        data have none."""
        config = self.config
        return torch.stack(
            [
                load_design(item["design"], config.size, config.pixel) if "design" in item else mask
                for item, mask in zip(items, masks, strict=True)
            ]
        )

    def _explain_columns(self, reference: Reference) -> str:
        """Return sentences that explain columns of the table, with their units and numbers of sites."""
        num_sides, num_sites = (sum(map(len, sites)) for sites in (reference.sides, reference.contest))
        return (
            f"What prints is where the image is above {self.resist.threshold:g}. edges_lost is of {num_sides} pixel sides at "
            f"edges of the designs, epe_violations of {num_sites} sites (more than 15 nm off, as in the ICCAD 2013 contest), "
            "dose_band_nm2 the area per mask between doses of 0.98 and 1.02, in nm^2."
        )

    def _pictures(self, mask: Tensor, true: Tensor, found: Tensor, design: Tensor) -> dict[str, str]:
        """Draw the first held-out masks with their true images, the network's images, the errors, the
        contours and the prints over the designs. Return {caption: PNG as a data URI}.

        Args:
            mask, true, found, design: (N, 1, H, W) each, with margins.
        """
        measures, pixel_nm, threshold = self.measures, self.config.pixel, self.resist.threshold
        mask, true, found = (images[:_NUM_PICTURES, 0] for images in (mask, true, found))
        true_latent, found_latent = (self.resist.latent(images, pixel_nm) for images in (true, found))
        overlays = draw_errors(
            design[:_NUM_OVERLAYS, 0], true_latent[:_NUM_OVERLAYS], threshold, pixel_nm, measures.margin
        )
        # The other pictures leave the margins out.
        mask, true, found, true_latent, found_latent = map(
            measures.inner, (mask, true, found, true_latent, found_latent)
        )
        grid = Grid("nm", pixel_nm)
        intensity = Colours("intensity", 0, float(true.max()), "viridis")
        error = Colours("absolute error", 0, 0.05)
        return {
            "mask": row(mask, Colours("transmission", 0, 1), grid),
            "image in the resist" if self._learns_resist else "aerial image": row(true, intensity, grid),
            "image of the network": row(found, intensity, grid),
            "absolute error of the network": row((found - true).abs(), error, grid),
            "contours over the mask: true in blue, network in orange": draw_contours(
                mask, true_latent, found_latent, threshold, pixel_nm
            ),
            "what the true image prints over the design: errors at the edges, inside in purple and outside in "
            "orange, and widths along the middle row in nm": overlays,
        }


def _compare_errors(network: np.ndarray, other: np.ndarray) -> str:
    """Compare the network's squared errors with those of another method, in a clause to be followed by the
    name of the method.

    Args:
        network: the network's mean squared error for each mask, (N,).
        other: that of the other method, (N,).
    """
    ratio = float(other.mean() / max(network.mean(), 1e-12))
    low, high = verdict.ratio_interval(other, network)
    if low <= 1 <= high:
        return f"a squared error that cannot be told ({1 / high:.2g} to {1 / low:.2g} times) from that of"
    if ratio > 1:
        return f"{ratio:.1f} times (95 % interval {low:.1f} to {high:.1f}) less squared error than"
    return f"{1 / ratio:.1f} times (95 % interval {1 / high:.1f} to {1 / low:.1f}) the squared error of"


def _item(pair: Pair) -> Item:
    """Return the fields of a pair that have a value, by name."""
    return {name: value for name, value in vars(pair).items() if value is not None}


@torch.no_grad()
def _image(model: nn.Module, mask: Tensor) -> Tensor:
    """Return the network's images (N, 1, H, W) of masks, in at least float32, without DDP's collectives."""
    network = model.module if isinstance(model, DistributedDataParallel) else model
    return at_least_float32(network(mask))
