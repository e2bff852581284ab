"""A 3D variational autoencoder on random patches of volumes (MONAI's AutoencoderKL).

The edges of the latent volume are the patch's edges / 2^(levels - 1), and it has `latent_channels` channels.
The result compares the autoencoder, on held-out patches, with baselines that keep as many values per patch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from monai.networks.nets import AutoencoderKL, PatchDiscriminator
from monai.transforms import Compose
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.data import inspection
from nbgpu.engine.data.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.data.loader import SampleLoader, grid_patches
from nbgpu.engine.data.parts import Parts, split
from nbgpu.engine.data.sampling import Draw, augmentation
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders, Predicted, Proposal
from nbgpu.errors import DataError
from nbgpu.planning.epochs import DataAmount
from nbgpu.planning.volume_files import VolumeList, find_volumes
from nbgpu.recipes import side_by_side
from nbgpu.recipes.autoencoder.baselines import compared
from nbgpu.recipes.autoencoder.choices import propose_networks
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.losses import (
    FeatureDistance,
    discriminator_loss,
    generator_loss,
    kl_divergence,
    spectral_distance,
)
from nbgpu.recipes.autoencoder.network import build_network, pretrained_network
from nbgpu.recipes.autoencoder.prediction import encoded, new_volumes, write_index
from nbgpu.recipes.autoencoder.reading import Prepare, VolumeReader, mni152, volume_item
from nbgpu.recipes.image_quality import psnr_db
from nbgpu.recipes.side_by_side import Colours
from nbgpu.run_folder.predictions import Job, Row

MAX_HELD_OUT_VOXELS = 2**21
"""The largest number of held-out voxels: enough for a stable mean (64 patches of 32^3), few enough to
validate often."""
MAX_BASELINE_PATCHES = 1024
MAX_BASELINE_VALUES = 2**25
"""The largest numbers of training patches, and of their values (128 MiB), to which the mean image and PCA are
fitted."""
_INTENSITY = Colours("intensity, scaled", 0, 1)
_ERROR = Colours("absolute error", 0, 0.5)


class Autoencoder:
    """Trains MONAI's AutoencoderKL.

    The loss is reconstruction + kl_weight * KL to a standard normal latent and, if the settings request
    them, a perceptual distance and an adversarial term with a PatchDiscriminator.

    Data (`config.data`):

    - 'mni152': the ICBM152 2009a T1 template that comes with nilearn. It is one volume, so that training and
      held-out patches come from two parts of it that share no voxel: the foremost `val_fraction` of the
      brain (at least one patch thick) is held out. The cut is across the longest axis, which is front to
      back: the template's hemispheres mirror each other, and a cut between them would hold out copies of the
      training data. Intensities are scaled with the whole volume's percentiles.
    - 'phantoms': `num_phantoms` generated volumes as large as a patch; the first `val_fraction` are held out.
    - a path: see `find_volumes`. Whole volumes are held out; a single volume is cut as the template is.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        self.config = config
        self._feature_distance = FeatureDistance(config) if config.perceptual == "features" else None
        self._passed_over = ""
        """A warning about files in the folder that are no volumes; set by `_parts`."""

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the rank's patches, {"image": (batch_size, C, p, q, r)} with values from 0 to 1 before
        augmentation.

        Raises DataError with a line for every unusable file.
        """
        config = self.config
        network = self._feature_distance.network if self._feature_distance else None
        self._check_weights()
        parts = self._parts()
        inspection.require_share(config, parts.everything, self._steps(), rank, world_size)
        # The held-out share is decoded first, because it is the smaller part and a bad file in it should be
        # reported before the cache is filled.
        share = self._held_out_share(parts.validation, rank, world_size)
        val_batches = [{"image": chunk} for chunk in torch.split(share, config.batch_size) if len(chunk)]
        draw = self._draw(augment=augmentation(config, ["image"], config.patch, intensity_keys=["image"]))
        loaders = SampleLoader(
            parts, self._steps(), draw, config, rank=rank, world_size=world_size, device=device
        ).loaders(val_batches)
        distance = (f"perceptual distance: features of {network.words}",) if network else ()
        return replace(
            loaders,
            summary=(*loaders.summary, *distance),
            warnings=(*loaders.warnings, *self._warnings(loaders.steps_per_epoch)),
        )

    def _warnings(self, steps_per_epoch: int) -> Iterator[str]:
        """Yield a warning about files that were ignored, features of random filters, and a discriminator that
        would begin after the run's end."""
        config = self.config
        if self._passed_over:
            yield self._passed_over
        if config.perceptual == "features" and config.perceptual_network == "random":
            yield "perceptual='features': the features are those of random filters; perceptual_network names others"
        first_step = self.discriminator_first_step(steps_per_epoch)
        last_step = config.total_steps(steps_per_epoch)
        if config.adversarial_weight and first_step >= last_step:
            yield (
                f"the discriminator would begin after {first_step} steps, and the run ends with step {last_step}. "
                "Lower adversarial_after"
            )

    def inspect(self) -> None:
        """Read the files with weights, and all volumes.

        Raises:
            DataError: a line for each unusable file.
        """
        failures = []
        for check in (self._read_network, self._check_weights, self._check_volumes):
            try:
                check()
            except DataError as error:
                failures.append(error)
        raise_together(failures)

    def _read_network(self) -> None:
        """Read the perceptual network, which stays in memory; DataError if a file of it is unusable."""
        if self._feature_distance:
            _ = self._feature_distance.network

    def _check_weights(self) -> None:
        """Raise DataError if the file `pretrained` does not fit the network."""
        if self.config.pretrained:
            pretrained_network(self.config)

    def _check_volumes(self) -> None:
        inspection.require(self.config, self._parts().everything, self._steps())

    def proposals(self, on_gpu: bool) -> list[Proposal]:
        """Propose values, the largest first, for the settings of network and patch size that were left out;
        each patch fits into the smallest volume. A DataError has a line for each unusable file."""
        volumes = list(dict.fromkeys(item["image"] for item in self._parts().everything))
        return propose_networks(self.config, volumes, on_gpu)

    def amount(self) -> DataAmount:
        """Return the amount of data; only names and headers of files are read."""
        return self._parts().amount(self.config.samples_per_volume)

    def _draw(self, augment: Compose | None = None) -> Draw:
        return Draw(
            patch_size=self.config.patch, samples_per_volume=self.config.samples_per_volume, augment=augment
        )

    def _parts(self) -> Parts:
        """Divide the volumes into training, validation and test part, with all volumes of a patient in the
        same part. A single volume becomes an Item for each part, with the same file and the key `part`."""
        config = self.config
        if config.data == "phantoms":
            items: list[Item] = [{"name": f"phantom {i}", "phantom": i} for i in range(config.num_phantoms)]
            num_left = len(items) - 1
            num_val = min(round(config.val_fraction * len(items)), num_left)
            num_test = min(round(config.test_fraction * len(items)), num_left - num_val)
            end = num_val + num_test
            return Parts(items[end:], items[:num_val], items[num_val:end])
        if config.data == "mni152":
            return self._parts_of_cut_volume({"name": "mni152", "image": mni152()})
        volumes = find_volumes(config.data)
        self._passed_over = volumes.passed_over
        self._check_headers(volumes.everything)
        items = [volume_item(path) for path in volumes.training]
        if volumes.validation or volumes.test:
            # A list that says which part each volume belongs to.
            validation, test = ([volume_item(p) for p in part] for part in (volumes.validation, volumes.test))
            parts = Parts(items, validation, test)
            self._refuse_shared_patients(parts, volumes)
            return parts
        if len(items) == 1:
            return self._parts_of_cut_volume(items[0])
        return split(items, config, lambda item: volumes.patient_of(item["image"], config.patient_pattern))

    def _refuse_shared_patients(self, parts: Parts, volumes: VolumeList) -> None:
        """Raise DataError if volumes of one patient are in two parts: the held-out error would then be too
        low, because the network has seen the patient."""
        parts_by_patient: dict[str, set[str]] = defaultdict(set)
        for part, items in vars(parts).items():
            for item in items:
                patient = volumes.patient_of(item["image"], self.config.patient_pattern)
                parts_by_patient[patient].add(part)
        problems = [
            f"{self.config.data}: the patient {patient} is in {' and in '.join(sorted(names))}"
            for patient, names in parts_by_patient.items()
            if len(names) > 1
        ]
        if problems:
            raise DataError("\n".join(problems))

    def _check_headers(self, paths: Sequence[Path]) -> None:
        """Raise DataError with a line for each file whose header makes it unusable. If there is one, the
        voxels of the other files are checked as well, so that one message has all problems."""
        reader = VolumeReader.of(self.config)
        problems = {path: reader.problem(path, self.config.patch) for path in paths}
        if any(problems.values()):
            others = [volume_item(path) for path, problem in problems.items() if problem is None]
            lines = [f"{path}: {problem}" for path, problem in problems.items() if problem is not None]
            raise DataError("\n".join(lines + inspection.problems(self.config, others, self._steps())))

    def _parts_of_cut_volume(self, item: Item) -> Parts:
        """Return Items for the training, validation and test part of a single volume, which `Prepare` cuts
        across its longest axis."""
        has_val, has_test = self.config.val_fraction > 0, self.config.test_fraction > 0
        if not (has_val or has_test):
            return Parts([item], [], [])
        training, validation, test = ({**item, "part": part} for part in ("training", "validation", "test"))
        return Parts([training], [validation] if has_val else [], [test] if has_test else [])

    def _steps(self) -> Compose:
        """Return the transform that decodes an Item; its settings are part of the key of the cache on
        disk."""
        config = self.config
        reader, fractions = VolumeReader.of(config), (config.val_fraction, config.test_fraction)
        return Compose([Prepare(reader, config.patch, config.split_seed, *fractions)])

    def _held_out_share(self, held_out: Sequence[Item], rank: int, world_size: int) -> Tensor:
        """Return the rank's held-out patches (N, C, p, q, r), N >= 0. The ranks share out whole volumes; if
        there are fewer volumes than ranks, each rank decodes all of them and takes its share of the
        patches."""
        volumes, num_per_volume = self._evaluated(held_out)
        by_volume = len(volumes) >= world_size
        items = volumes[rank::world_size] if by_volume else volumes
        patches = self._held_out_patches(items, num_per_volume)
        return patches if by_volume else patches[rank::world_size]

    def _evaluated(self, held_out: Sequence[Item]) -> tuple[Sequence[Item], int]:
        """Return (the held-out volumes that are evaluated, the number of patches of each): in all at most
        MAX_HELD_OUT_VOXELS voxels, or 8 patches, whatever the number of ranks."""
        limit = self.config.num_evaluated(max(8, MAX_HELD_OUT_VOXELS // math.prod(self.config.patch)))
        volumes = held_out[:limit]
        return volumes, limit // max(1, len(volumes))

    def _held_out_patches(self, items: Sequence[Item], num_per_volume: int) -> Tensor:
        """Decode volumes and cut patches (N, C, p, q, r) at fixed places, so that each validation compares
        the same patches."""
        patch = self.config.patch
        decode = Decode(self._steps())
        patches = [torch.empty(0, self.config.num_image_channels, *patch)]
        for item in items:
            decoded = decode(item)
            if "failure" not in decoded:
                patches.append(grid_patches(decoded["image"], patch, num_per_volume))
        raise_together(decode.failures)
        return torch.cat(patches)

    def _training_patches(self, training: Sequence[Item]) -> Tensor:
        """Draw the training patches to which baselines are fitted, (N, C, p, q, r), the same for every world
        size."""
        config = self.config
        limit = max(2, min(MAX_BASELINE_PATCHES, MAX_BASELINE_VALUES // math.prod(config.patch)))
        limit = config.num_evaluated(limit)
        draw = self._draw()
        decode = Decode(self._steps())
        # As many volumes as needed are decoded again. If they are too few, each is sampled several times;
        # a phantom is one patch, and gives the same each time.
        num_volumes = min(len(training), math.ceil(limit / config.samples_per_volume))
        num_draws = math.ceil(limit / (num_volumes * config.samples_per_volume))
        if config.data == "phantoms":
            num_draws = 1
        patches: list[Tensor] = []
        for index, item in enumerate(training[:num_volumes]):
            volume = opened(decode(item))
            for number in range(num_draws):
                seed = np.random.SeedSequence([config.seed, index, number])
                patches += [sample["image"] for sample in draw(volume, seed)]
        return torch.stack(patches[:limit])

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """Return the network of the settings, with random weights or those of the file `pretrained`.

        Raises DataError if the file is unusable.
        """
        return pretrained_network(self.config) if self.config.pretrained else build_network(self.config)

    def example(self, batch_size: int) -> Batch:
        """Return {"image": (batch_size, C, p, q, r)} with values from 0 to 1."""
        # The perceptual network must be read before a step's memory is estimated on the device 'meta', where
        # tensors have no values.
        self._read_network()
        return {"image": torch.rand(batch_size, self.config.num_image_channels, *self.config.patch)}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the residual blocks, and the layers between them that halve or double the resolution."""
        assert isinstance(model, AutoencoderKL)
        return [
            module
            for part in (model.encoder, model.decoder)
            for module in cast(nn.ModuleList, part.blocks)
            if next(module.parameters(), None) is not None
        ]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` = `recon_loss` + kl_weight * `kl_loss` + perceptual_weight * `perceptual_loss`, all
        scalars.

        The last term is present only with `perceptual`. See `kl_divergence`, `spectral_distance` and
        `FeatureDistance`.
        """
        return self._terms(model, batch)[0]

    def _terms(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Return (the terms of the loss, the reconstruction)."""
        config, image = self.config, batch["image"]
        reconstruction, mean, sigma = model(image)
        reconstruction = at_least_float32(reconstruction)
        recon_loss = self._recon_loss(reconstruction, image).mean()
        kl_loss = kl_divergence(mean, sigma)
        loss = recon_loss + config.kl_weight * kl_loss
        terms = {"recon_loss": recon_loss, "kl_loss": kl_loss}
        if config.perceptual != "none":
            # The distances take one channel: (N, C, D, H, W) becomes (N * C, 1, D, H, W).
            output, true = (volumes.flatten(0, 1)[:, None] for volumes in (reconstruction, image))
            distance = (self._feature_distance or spectral_distance)(output, true)
            loss = loss + config.perceptual_weight * distance
            terms["perceptual_loss"] = distance
        return {"loss": loss, **terms}, reconstruction

    # ---- the discriminator ----

    def discriminator_first_step(self, steps_per_epoch: int) -> int:
        """Return the number of steps before the discriminator takes part: none in a smoke test, which must
        cover everything."""
        if self.config.smoke_test:
            return 0
        if self.config.adversarial_after_epochs is not None:
            return round(self.config.adversarial_after_epochs * steps_per_epoch)
        return self.config.adversarial_after

    @property
    def discriminator_lr(self) -> float:
        return self.config.discriminator_lr

    def build_discriminator(self) -> nn.Module | None:
        """Return MONAI's PatchDiscriminator (Isola et al., CVPR 2017), which judges overlapping parts of a
        patch.

        It has InstanceNorm, as in MONAI's tutorial, because batch statistics would differ between the ranks.
        """
        config = self.config
        if not config.adversarial_weight:
            return None
        return PatchDiscriminator(
            spatial_dims=3,
            in_channels=config.num_image_channels,
            channels=config.discriminator_channels,
            num_layers_d=config.num_discriminator_layers,
            norm="INSTANCE",
        )

    def loss_against(
        self, discriminator: nn.Module, model: nn.Module, batch: Batch
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        """Return the terms of `loss` with adversarial_weight * `adversarial_loss` added, and the input of
        `discriminator_loss`: (detached reconstruction, image)."""
        terms, reconstruction = self._terms(model, batch)
        adversarial_loss = generator_loss(_logits(discriminator, reconstruction))
        loss = terms["loss"] + self.config.adversarial_weight * adversarial_loss
        images = reconstruction.detach(), batch["image"]
        return {**terms, "loss": loss, "adversarial_loss": adversarial_loss}, images

    def discriminator_loss(self, discriminator: nn.Module, seen: tuple[Tensor, Tensor]) -> Tensor:
        """Return the least-squares loss of the discriminator, a scalar, for the detached reconstruction and
        the image that `loss_against` returned."""
        reconstruction, image = seen
        return discriminator_loss(_logits(discriminator, reconstruction), _logits(discriminator, image))

    # ---- validation ----

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` (reconstruction only) and `psnr_db` of each sample, shape (N,), from the mean
        latent."""
        image = batch["image"]
        reconstruction = _reconstruct(model, image)
        return {
            "loss": self._recon_loss(reconstruction, image).flatten(1).mean(dim=1),
            "psnr_db": psnr_db(reconstruction, image),
        }

    def pictures(self, model: nn.Module, batch: Batch) -> dict[str, str]:
        """Return the middle slices of the batch: originals, reconstructions and errors."""
        image = batch["image"]
        return pictures(image.float().cpu(), _reconstruct(model, image).cpu(), num_samples=4)

    def _recon_loss(self, reconstruction: Tensor, image: Tensor) -> Tensor:
        difference = reconstruction - image
        return difference.abs() if self.config.recon_loss == "l1" else difference.square()

    # ---- result ----

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Return held-out PSNR (dB) and SSIM beside baselines that keep at most as many values per patch.

        Every reconstruction is clipped to 0..1, the range of the data. Returns `table` {method: {"psnr_db",
        "ssim"}}, `note` in words, and `images` {caption: PNG as a data URI}.
        """
        parts = self._parts()
        training, held_out = parts.training, parts.reported
        image = self._held_out_patches(*self._evaluated(held_out))
        if not len(image):
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}
        batches = torch.split(image, self.config.batch_size)
        reconstruction = torch.cat([_reconstruct(model, batch.to(device)).cpu() for batch in batches])
        fitted_on = self._training_patches(training)
        table, note = compared(self.config, image, reconstruction, fitted_on)
        note += parts.in_words(self.config)
        return {"table": table, "note": note, "images": pictures(image, reconstruction)}

    # ---- new data ----

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return the volumes of a folder or list, and a line for each bad file."""
        return new_volumes(self.config, data)

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Encode a whole volume in overlapping windows, and write its latent as .npy and its reconstruction
        as NIfTI on the file's own grid."""
        assert isinstance(model, AutoencoderKL)
        return encoded(model, device, self.config, sample, stem)

    def reference_samples(self) -> Sequence[Item]:
        """Return none: a volume's latent does not depend on other volumes."""
        return []

    def conclude(
        self, rows: Sequence[Row], references: Sequence[Row], job: Job
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Write `latents.json`, with the scale factor that diffusion models need; return no further columns,
        and a sentence about the factor."""
        return {}, write_index(self.config, rows, job)


def _logits(discriminator: nn.Module, image: Tensor) -> Tensor:
    """Return a PatchDiscriminator's logits for each part of the patches.

    Autocast is switched off for the discriminator: with bf16 on a CPU the gradient of its last layer was NaN
    (torch 2.13).
    """
    # The device 'meta', on which memory is estimated, has no autocast.
    is_meta = image.device.type == "meta"
    with nullcontext() if is_meta else torch.autocast(image.device.type, enabled=False):
        logits: Tensor = discriminator(image)[-1]
    return logits


@torch.no_grad()
def _reconstruct(model: nn.Module, image: Tensor) -> Tensor:
    """Return images (N, C, p, q, r) encoded to the mean latent and decoded, in float32 and clipped to
    0..1."""
    network = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(network, AutoencoderKL)
    return network.reconstruct(image).float().clamp(0, 1)


def pictures(image: Tensor, reconstruction: Tensor, num_samples: int = 6) -> dict[str, str]:
    """Draw the middle slices of some samples side by side, with the channels of a sample one after another:
    the images, the reconstructions and the errors. Return {caption: PNG as a data URI}.

    Args:
        image, reconstruction: (N, C, p, q, r), from 0 to 1.
        num_samples: the largest number of samples.
    """
    chosen = torch.linspace(0, len(image) - 1, min(num_samples, len(image))).round().long()
    original, output = image[chosen].flatten(0, 1), reconstruction[chosen].flatten(0, 1)
    error = (output - original).abs()
    return {
        "original": side_by_side.middle_slices_uri(original, _INTENSITY),
        "reconstruction": side_by_side.middle_slices_uri(output, _INTENSITY),
        "absolute error of the reconstruction": side_by_side.middle_slices_uri(error, _ERROR),
    }
