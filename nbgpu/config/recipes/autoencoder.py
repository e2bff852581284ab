"""The settings of the recipe autoencoder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from nbgpu.config.conditions import DefaultRules, Rules, defaults, given, left_out, none_of, one_of, only
from nbgpu.config.settings import control, divides_the_data, read_from, shape_of_model, steered
from nbgpu.config.training import TrainConfig


class AutoencoderConfig(TrainConfig):
    """MONAI's 3D AutoencoderKL on random patches of volumes."""

    IMPLEMENTATION = "nbgpu.recipes.autoencoder.recipe:Autoencoder"
    VALIDATION_VALUES = ("loss", "psnr_db")
    LIVE_PICTURES = True
    WITHOUT_FILES = ("mni152", "phantoms")
    INPUTS = "a folder of NIfTI files, or a CSV or JSON list of them; 'mni152', 'phantoms'"
    TRIAL = "a template brain, 200 steps: 2 minutes on 2 CPU cores"
    PREDICTS = "latents, and reconstructions as NIfTI on the grid of the volumes"
    FROM_DATA = ("patch_size", "channels", "latent_channels")
    UNUSED: ClassVar[Mapping[str, str]] = {"sdpa": "the network has no attention"}
    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("data", "phantoms"), "num_phantoms"),
        only(left_out("adversarial_after_epochs"), "adversarial_after"),
        only(none_of("data", "phantoms"), "patches_per_volume"),
        only(none_of("data", "phantoms", "mni152"), "patient_pattern", "split"),
        only(one_of("perceptual", "spectral", "features"), "perceptual_weight"),
        only(one_of("perceptual", "features"), "perceptual_network"),
        only(
            given("adversarial_weight"),
            "adversarial_after",
            "adversarial_after_epochs",
            "discriminator_lr",
            "discriminator_channels",
            "discriminator_layers",
        ),
    )
    # The rate is a tenth of the guide's, at which its own project reports NaN. Its 1000 epochs take one patch
    # of each volume, and 60 epochs here take patches_per_volume.
    DEFAULTS_WITH: ClassVar[DefaultRules] = (
        defaults(
            none_of("data", "mni152", "phantoms"),
            epochs=60,
            lr=1e-4,
            val_every_epochs=1,
            patch_size=0,
            channels=(),
            latent_channels=0,
        ),
    )

    recipe: Literal["autoencoder"] = Field("autoencoder", description="the workload")
    lr: float = Field(
        4e-3,
        gt=0,
        le=10,
        description="peak learning rate, before lr_scaling",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    data: str = Field(
        "mni152",
        description="'mni152' (nilearn's template brain), 'phantoms' (generated ellipsoids), a folder of NIfTI "
        "files, or a CSV or JSON list of them",
        json_schema_extra=control("Data") | read_from(*WITHOUT_FILES),
    )
    patch_size: int = Field(
        32,
        ge=0,
        le=512,
        multiple_of=4,
        description="edge of the cubic patches, in voxels; 0 for as large as the files' volumes and the memory allow",
        json_schema_extra=control("Data"),
    )
    patches_per_volume: int = Field(
        16, ge=1, le=4096, description="random patches that one volume gives in one epoch"
    )
    patient_pattern: str = Field(
        "",
        description="regular expression whose first group names the patient in a file's path, such as '(case_[0-9]+)'; "
        "left out: the names of BIDS and BraTS, or a column 'patient' of the list, else each file by itself. All "
        "files of a patient are in the same part",
        json_schema_extra=divides_the_data(),
    )
    num_phantoms: int = Field(512, ge=4, le=1_000_000, description="phantoms generated where data='phantoms'")
    channels: tuple[int, ...] = Field(
        (8, 16),
        max_length=5,
        description="feature channels at each resolution, finest first; () for three resolutions with as many as the memory "
        "allows, for files",
        json_schema_extra=shape_of_model(),
    )
    latent_channels: int = Field(
        2,
        ge=0,
        le=64,
        description="channels of the latent volume; 0 for as many as go with channels, for files",
        json_schema_extra=shape_of_model(),
    )
    recon_loss: Literal["l1", "l2"] = Field(
        "l2", description="reconstruction loss; l2 is what PSNR measures, l1 keeps edges sharper"
    )
    kl_weight: float = Field(
        1e-7, ge=0, le=1, description="weight of the KL term, summed over a sample's latent volume"
    )
    perceptual: Literal["none", "spectral", "features"] = Field(
        "none",
        description="a distance beside recon_loss: 'spectral' compares the amplitudes of frequencies, 'features' what a "
        "frozen network makes of both",
    )
    perceptual_weight: float = Field(0.1, gt=0, le=1000, description="weight of that distance")
    perceptual_network: str = Field(
        "random",
        min_length=1,
        description="weights for perceptual='features': 'random' for two layers of random filters, or a safetensors file "
        "with 0.weight, 0.bias, 1.weight ... of 3D convolutions, with an average over 2 x 2 x 2 before each but the first",
        json_schema_extra=read_from("random"),
    )
    adversarial_weight: float = Field(
        0.0,
        ge=0,
        le=100,
        description="weight of deceiving a discriminator that learns to tell reconstructions from images, such as 0.01; 0 "
        "for none",
    )
    adversarial_after: int = Field(
        100, ge=0, le=10_000_000, description="steps before the discriminator takes part"
    )
    adversarial_after_epochs: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="the same in epochs, also in parts of one; in place of adversarial_after",
    )
    discriminator_lr: float = Field(
        1e-3,
        gt=0,
        le=10,
        description="peak learning rate of the discriminator, which follows the model's schedule",
        json_schema_extra=steered("step"),
    )
    discriminator_channels: int = Field(
        16,
        ge=1,
        le=1024,
        description="feature channels of the discriminator's first layer; each next one has twice as many",
        json_schema_extra=shape_of_model(),
    )
    discriminator_layers: int | None = Field(
        None,
        ge=1,
        le=8,
        description="layers between its first and its last; left out: 3, or as many as a patch has voxels for",
        json_schema_extra=shape_of_model(),
    )

    @property
    def num_discriminator_layers(self) -> int:
        """The value of `discriminator_layers`, or its default where it is left out."""
        return min(3, self._most_layers) if self.discriminator_layers is None else self.discriminator_layers

    @property
    def _most_layers(self) -> int:
        # Every layer but the last halves the patch, and 4 voxels of it must be left.
        return int(math.log2(self.patch_size)) - 2

    def problems(self) -> Iterator[str]:
        try:
            if self.patient_pattern and not re.compile(self.patient_pattern).groups:
                yield f"patient_pattern={self.patient_pattern!r} has no group, such as (case_[0-9]+)"
        except re.error as error:
            yield f"patient_pattern={self.patient_pattern!r} is no regular expression: {error}"
        for name in self.FROM_DATA:
            if self.data in self.WITHOUT_FILES and not getattr(self, name):
                yield f"{name}={getattr(self, name)} leaves it to files, and data={self.data!r} has none. Give {name}"
        if 0 < self.patch_size < 8:
            yield f"patch_size={self.patch_size} must be at least 8"
        if len(self.channels) == 1:
            yield f"channels={self.channels} must be two resolutions or more"
        if (
            self.patch_size
            and self.discriminator_layers is not None
            and self.discriminator_layers > self._most_layers
        ):
            yield (
                f"discriminator_layers={self.discriminator_layers} are too many for patch_size={self.patch_size}: at most "
                f"{self._most_layers}"
            )
        shrink = 2 ** max(0, len(self.channels) - 1)
        if self.patch_size % shrink:
            yield (
                f"patch_size={self.patch_size} must be a multiple of {shrink}, because {len(self.channels)} "
                f"channel levels halve it {len(self.channels) - 1} times"
            )
        if min(self.channels, default=1) < 1:
            yield f"channels={self.channels} must all be at least 1"
