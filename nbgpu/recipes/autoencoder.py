"""A 3D variational autoencoder on random patches of volumes (MONAI's AutoencoderKL).

The latent volume has the patch's edge / 2^(levels - 1) and `latent_channels` channels. What it is worth is
said beside baselines that keep as many numbers for each patch, on patches that nothing was trained on.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib.image
import numpy as np
import torch
from monai.metrics import SSIMMetric
from monai.networks.nets import AutoencoderKL
from monai.transforms import (
    Compose,
    CropForeground,
    SpatialPad,
    Transform,
)
from monai.utils import convert_to_tensor
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from nbgpu.config import AutoencoderConfig
from nbgpu.engine.augmentation import augmentation
from nbgpu.engine.data import SampleLoader, grid_patches, hold_out
from nbgpu.engine.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.draws import FOREGROUND, Draw
from nbgpu.engine.precision import at_least_float32
from nbgpu.engine.volumes import check_headers, find_volumes, load_volume, scale_intensity
from nbgpu.errors import DataError
from nbgpu.recipes import CPU, Batch, Loaders
from nbgpu.recipes.phantoms import phantom

MAX_HELD_OUT_VOXELS = 2**21
"""Over all held-out patches: enough for a steady mean (64 patches of 32^3), few enough to validate often."""

MAX_BASELINE_PATCHES = 1024
MAX_BASELINE_VALUES = 2**25
"""The mean image and PCA are fitted on so many training patches and values (128 MiB) at most."""


class Autoencoder:
    """Trains MONAI's AutoencoderKL: reconstruction + kl_weight * KL to a standard normal latent.

    Data (`config.data`):
    - 'mni152': the ICBM152 2009a T1 template that nilearn carries. One volume, so that training and held-out
      patches come from two parts of it that share no voxel: the foremost `val_fraction` of the brain (at
      least one patch thick) is held out. The cut goes across the longest axis, which is front to back: the
      template's hemispheres mirror each other, and a cut between them would hold out what was trained on.
      Intensities are scaled with the whole volume's percentiles.
    - 'phantoms': `num_phantoms` generated volumes of patch_size^3; the first `val_fraction` are held out.
    - a path: see `find_volumes`. Whole volumes are held out; a single one is cut as the template is.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        self.config = config

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """The rank's patches, {"image": (batch_size, 1, p, p, p)} with values from 0 to 1 before augmentation.

        Raises DataError: one line for every file that cannot be used.
        """
        config = self.config
        training, held_out = self._items()
        # Decoded first: it is the smaller part, and a bad file in it should not wait for the cache.
        share = self._held_out_share(held_out, rank, world_size)
        val_batches = [{"image": chunk} for chunk in torch.split(share, config.batch_size) if len(chunk)]
        cube = (config.patch_size,) * 3
        draw = self._draw(augment=augmentation(config, ["image"], cube, intensity_keys=["image"]))
        return SampleLoader(
            training, self._steps(), draw, config, rank=rank, world_size=world_size, device=device
        ).loaders(val_batches)

    def amount(self) -> tuple[int, int]:
        """Of the files only names and headers are read."""
        training, _ = self._items()
        return len(training), self._patches_per_volume

    def _draw(self, augment: Compose | None = None) -> Draw:
        return Draw(
            patch_size=self.config.patch_size, samples_per_volume=self._patches_per_volume, augment=augment
        )

    @property
    def _patches_per_volume(self) -> int:
        return 1 if self.config.data == "phantoms" else self.config.patches_per_volume

    def _items(self) -> tuple[list[Item], list[Item]]:
        """(training, held out). `part` says which part of a volume an item is."""
        config = self.config
        if config.data == "phantoms":
            items: list[Item] = [{"name": f"phantom {i}", "phantom": i} for i in range(config.num_phantoms)]
            num_held_out = min(round(config.val_fraction * len(items)), len(items) - 1)
            return items[num_held_out:], items[:num_held_out]
        if config.data == "mni152":
            return self._two_parts({"name": "mni152", "image": _mni152()})
        volumes = find_volumes(config.data)
        check_headers((*volumes.training, *volumes.validation), config.patch_size)
        training = [_item(path) for path in volumes.training]
        if volumes.validation:
            return training, [_item(path) for path in volumes.validation]
        if len(training) == 1:
            return self._two_parts(training[0])
        return hold_out(training, config.val_fraction, config.seed)

    def _two_parts(self, item: Item) -> tuple[list[Item], list[Item]]:
        if self.config.val_fraction == 0:
            return [item], []
        return [{**item, "part": "training"}], [{**item, "part": "held out"}]

    def _steps(self) -> Compose:
        config = self.config
        return Compose([_Prepare(config.patch_size, config.seed, config.val_fraction)])

    def _held_out_share(self, held_out: Sequence[Item], rank: int, world_size: int) -> Tensor:
        """The rank's held-out patches (N, 1, p, p, p), N >= 0: its volumes', or its share of each volume's."""
        by_volume = len(held_out) >= world_size
        items = held_out[rank::world_size] if by_volume else held_out
        patches = self._held_out_patches(items, num_volumes=len(held_out))
        return patches if by_volume else patches[rank::world_size]

    def _held_out_patches(self, items: Sequence[Item], num_volumes: int) -> Tensor:
        p = self.config.patch_size
        max_patches = max(8, MAX_HELD_OUT_VOXELS // p**3)
        decode = Decode(self._steps())
        patches = [torch.empty(0, 1, p, p, p)]
        for item in items[:max_patches]:
            decoded = decode(item)
            if "failure" not in decoded:
                patches.append(grid_patches(decoded["image"], p, max(1, max_patches // num_volumes)))
        raise_together(decode.failures)
        return torch.cat(patches)

    def _training_patches(self, training: Sequence[Item]) -> Tensor:
        """Patches that the baselines are fitted on, (N, 1, p, p, p): the same ones for every world size."""
        p = self.config.patch_size
        limit = max(2, min(MAX_BASELINE_PATCHES, MAX_BASELINE_VALUES // p**3))
        draw = self._draw()
        decode = Decode(self._steps())
        # A few volumes are decoded once more, and each gives several rounds of patches where it has to.
        num_volumes = min(len(training), math.ceil(limit / self._patches_per_volume))
        rounds = (
            math.ceil(limit / (num_volumes * self._patches_per_volume))
            if self.config.data != "phantoms"
            else 1
        )
        patches: list[Tensor] = []
        for index, item in enumerate(training[:num_volumes]):
            volume = opened(decode(item))
            for number in range(rounds):
                seed = np.random.SeedSequence([self.config.seed, index, number])
                patches += [sample["image"] for sample in draw(volume, seed)]
        return torch.stack(patches[:limit])

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """AutoencoderKL without attention, one residual block a level.

        GroupNorm gets one group, so that it keeps how bright the channels are relative to each other: with 4
        groups it was 0.7 dB worse on the phantoms after 300 steps, with 8 groups 1.2 dB.
        """
        levels = len(self.config.channels)
        return AutoencoderKL(
            spatial_dims=3,
            in_channels=1,
            out_channels=1,
            channels=self.config.channels,
            num_res_blocks=(1,) * levels,
            attention_levels=(False,) * levels,
            latent_channels=self.config.latent_channels,
            norm_num_groups=1,
            with_encoder_nonlocal_attn=False,
            with_decoder_nonlocal_attn=False,
        )

    def example(self, batch_size: int) -> Batch:
        """{"image": (batch_size, 1, p, p, p)} with values from 0 to 1."""
        p = self.config.patch_size
        return {"image": torch.rand(batch_size, 1, p, p, p)}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The residual blocks, and what halves or doubles the resolution between them."""
        assert isinstance(model, AutoencoderKL)
        return [
            module
            for part in (model.encoder, model.decoder)
            for module in cast(nn.ModuleList, part.blocks)
            if next(module.parameters(), None) is not None
        ]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`loss` = `recon_loss` + kl_weight * `kl_loss`, all scalars.

        `kl_loss` is the KL divergence from the standard normal, summed over a sample's latent volume and
        averaged over the batch (Kingma & Welling 2014, appendix B). MONAI clamps the log-variance to -30..20.
        """
        image = batch["image"]
        reconstruction, mean, sigma = model(image)
        recon_loss = self._recon_loss(at_least_float32(reconstruction), image).mean()
        mean, variance = at_least_float32(mean), at_least_float32(sigma).square()
        kl_loss = 0.5 * (mean.square() + variance - variance.log() - 1).flatten(1).sum(dim=1).mean()
        return {
            "loss": recon_loss + self.config.kl_weight * kl_loss,
            "recon_loss": recon_loss,
            "kl_loss": kl_loss,
        }

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`loss` (reconstruction only) and `psnr_db` of each sample, shape (N,), from the mean latent."""
        image = batch["image"]
        reconstruction = _reconstruct(model, image)
        return {
            "loss": self._recon_loss(reconstruction, image).flatten(1).mean(dim=1),
            "psnr_db": psnr_db(reconstruction, image),
        }

    def _recon_loss(self, reconstruction: Tensor, image: Tensor) -> Tensor:
        difference = reconstruction - image
        return difference.abs() if self.config.recon_loss == "l1" else difference.square()

    # ---- result ----

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Held-out PSNR (dB) and SSIM beside baselines that keep at most as many numbers for each patch.

        Every reconstruction is clipped to 0..1, the range of the data. Returns `table` {method: {"psnr_db",
        "ssim"}}, `note` in words, and `images` {caption: PNG as a data URI}.
        """
        training, held_out = self._items()
        image = self._held_out_patches(held_out, num_volumes=len(held_out))
        if not len(image):
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}
        batches = torch.split(image, self.config.batch_size)
        reconstruction = torch.cat([_reconstruct(model, batch.to(device)).cpu() for batch in batches])
        num_latent = self.config.latent_channels * self._latent_edge**3
        grid_edge = _largest_cube_edge(num_latent)
        fitted_on = self._training_patches(training)
        mean_image, components = _principal_components(fitted_on, num_latent)
        baselines = {
            "trilinear, same number of values": _trilinear(image, grid_edge),
            "PCA, same number of values": _project(image, mean_image, components),
            "mean image": mean_image.expand_as(image),
        }
        table = {
            name: {
                "psnr_db": round(float(psnr_db(output, image).mean()), 3),
                "ssim": round(float(ssim(output, image).mean()), 4),
            }
            for name, output in {"autoencoder": reconstruction, **baselines}.items()
        }
        best = max(table, key=lambda name: table[name]["psnr_db"])
        gain_db = table["autoencoder"]["psnr_db"] - max(
            row["psnr_db"] for name, row in table.items() if name != "autoencoder"
        )
        verdict = (
            f"The autoencoder is best, by {gain_db:.1f} dB"
            if best == "autoencoder"
            else f"'{best}' is best; the autoencoder is {-gain_db:.1f} dB below it"
        )
        note = (
            f"{verdict}, on {len(image)} held-out patches of {self.config.patch_size}^3 voxels. For each patch the "
            f"autoencoder keeps {num_latent} numbers, trilinear sampling {grid_edge}^3 = {grid_edge**3}, PCA "
            f"{len(components)}"
        )
        if len(components) < num_latent:
            note += f" (no more, because it was fitted on {len(fitted_on)} training patches)"
        return {"table": table, "note": note + ".", "images": _pictures(image, reconstruction)}

    @property
    def _latent_edge(self) -> int:
        shrink: int = 2 ** (len(self.config.channels) - 1)
        return self.config.patch_size // shrink


class _Prepare(Transform):
    """The deterministic part, which the cache keeps: an Item to {"image": (1, D, H, W), FOREGROUND}."""

    def __init__(self, patch_size: int, seed: int, val_fraction: float) -> None:
        self.patch_size = patch_size
        self.seed = seed
        self.val_fraction = val_fraction

    def __call__(self, item: Item) -> dict[str, Tensor]:
        if "phantom" in item:
            return {"image": phantom(self.patch_size, self.seed, item["phantom"])}
        source = item["image"]
        image = load_volume(source) if isinstance(source, Path) else source
        # Built for each call, because volumes are decoded in several threads, and these keep state.
        crop = Compose([CropForeground(), SpatialPad(self.patch_size)])
        image = convert_to_tensor(crop(scale_intensity(image, item["name"])), track_meta=False)
        if "part" in item:
            image = self._cut(image, item)
        return {"image": image, FOREGROUND: (image > image.mean()).flatten().nonzero().flatten().int()}

    def _cut(self, image: Tensor, item: Item) -> Tensor:
        """The training or the held-out part of a volume, on either side of a cut across its longest axis."""
        p = self.patch_size
        axis = max((1, 2, 3), key=lambda a: image.shape[a])
        length = image.shape[axis]
        if length < 2 * p:
            raise DataError(
                f"{item['name']}: is one volume of {length} voxels along its longest axis (without empty margins), "
                f"too short for a training and a held-out part of {p} voxels each. Lower patch_size, give a "
                "second volume, or set val_fraction=0"
            )
        num_held_out = min(max(p, round(self.val_fraction * length)), length - p)
        parts = torch.split(image, [length - num_held_out, num_held_out], dim=axis)
        part = parts[0 if item["part"] == "training" else 1].contiguous()
        if part.min() == part.max():
            raise DataError(
                f"{item['name']}: is one volume, and its {item['part']} part is empty. Give a second volume, or set "
                "val_fraction=0"
            )
        return part


def _item(path: Path) -> Item:
    return {"name": str(path), "image": path}


def _mni152() -> Tensor:
    """nilearn's T1 template at 1 mm, without the skull: (1, 197, 233, 189), axes to the right, front and top."""
    try:
        from nilearn.datasets import load_mni152_template
    except ModuleNotFoundError:
        raise DataError(
            "mni152: the template comes with nilearn, which is not installed. Run: pip install 'nbgpu[samples]', "
            "or set data to 'phantoms' or to a path"
        ) from None
    return torch.from_numpy(load_mni152_template(resolution=1).get_fdata(dtype=np.float32))[None]


@torch.no_grad()
def _reconstruct(model: nn.Module, image: Tensor) -> Tensor:
    """Encodes and decodes through the mean latent; float32, clipped to 0..1, shaped as `image`."""
    network = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(network, AutoencoderKL)
    return network.reconstruct(image).float().clamp(0, 1)


def psnr_db(output: Tensor, image: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each sample for a data range of 1, in dB: (N, ...) -> (N,). At most 100."""
    mse = (output - image).square().flatten(1).mean(dim=1)
    return -10 * mse.clamp_min(1e-10).log10()


def ssim(output: Tensor, image: Tensor) -> Tensor:
    """Structural similarity of each sample for a data range of 1: (N, 1, p, p, p) -> (N,).

    Wang et al. 2004 with their Gaussian window of 11 voxels, or 7 for patches smaller than that.
    """
    metric = SSIMMetric(spatial_dims=3, data_range=1.0, win_size=11 if image.shape[-1] >= 11 else 7)
    value = metric(output, image)
    assert isinstance(value, Tensor)
    return value.flatten()


# ---- baselines -----------------------------------------------------------------------------------------


def _largest_cube_edge(num_values: int) -> int:
    edge = round(math.cbrt(num_values))
    return edge if edge**3 <= num_values else edge - 1


def _trilinear(image: Tensor, grid_edge: int) -> Tensor:
    """Samples patches (N, 1, p, p, p) on a grid of grid_edge^3 points and interpolates back."""
    size = image.shape[2:]
    if grid_edge >= size[0]:
        return image
    sampled = functional.interpolate(image, size=(grid_edge,) * 3, mode="trilinear")
    return functional.interpolate(sampled, size=size, mode="trilinear").clamp(0, 1)


def _principal_components(training: Tensor, max_components: int) -> tuple[Tensor, Tensor]:
    """(mean (1, 1, p, p, p), components (K, p^3)), K at most max_components and one less than the patches.

    From the eigenvectors of the patches' scalar products ("snapshots", Sirovich 1987): there are far fewer
    patches than voxels, and a singular value decomposition of 1024 patches of 32^3 takes 20 s on one core.
    """
    mean = training.mean(dim=0, keepdim=True)
    centred = (training - mean).flatten(1).double()
    variances, vectors = torch.linalg.eigh(centred @ centred.T)  # in rising order
    # The mean takes a dimension away, and patches that are alike take more: their vectors mean nothing.
    num_meant = int((variances > 1e-10 * variances[-1]).sum())
    num_components = min(max_components, len(training) - 1, num_meant)
    components = vectors[:, -num_components:].T @ centred
    return mean, functional.normalize(components, dim=1).float()


def _project(image: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    weights = (image - mean).flatten(1) @ components.T
    return ((weights @ components).view_as(image) + mean).clamp(0, 1)


# ---- pictures ------------------------------------------------------------------------------------------


def _pictures(image: Tensor, reconstruction: Tensor, num_samples: int = 6) -> dict[str, str]:
    """{caption: PNG as a data URI}: the middle slices of some samples side by side, in three rows."""
    chosen = torch.linspace(0, len(image) - 1, min(num_samples, len(image))).round().long()
    original, output = (
        volumes[chosen, 0, :, :, volumes.shape[-1] // 2] for volumes in (image, reconstruction)
    )
    error = (output - original).abs()
    return {
        "original": _png(original, "gray", vmax=1.0),
        "reconstruction": _png(output, "gray", vmax=1.0),
        "absolute error, black is 0 and white 0.5": _png(error, "gray", vmax=0.5),
    }


def _png(slices: Tensor, colours: str, vmax: float) -> str:
    """(N, H, W) as one row of tiles, with the second axis upwards, each tile at least 96 pixels wide."""
    enlarge = max(1, math.ceil(96 / slices.shape[-1]))
    tiles = slices.transpose(1, 2).flip(1).repeat_interleave(enlarge, dim=1).repeat_interleave(enlarge, dim=2)
    row = functional.pad(tiles, (0, 4), value=vmax).permute(1, 0, 2).flatten(1)[:, :-4]
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, row.numpy(), cmap=colours, vmin=0.0, vmax=vmax, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
