"""The settings of the recipe autoencoder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nbgpu.config.conditions import (
    DefaultRules,
    Rules,
    defaults,
    given,
    left_out,
    none_of,
    one_of,
    only,
    widest,
)
from nbgpu.config.settings import Each, control, divides_the_data, read_from, shape_of_model, steered
from nbgpu.config.training import TrainConfig

_NEGLIGIBLE_KL_WEIGHT = 1e-6
"""Up to this weight the KL term is a few per cent of the loss, which no chart shows."""


class AutoencoderConfig(TrainConfig):
    """Train MONAI's 3D AutoencoderKL on random patches of volumes."""

    IMPLEMENTATION = "nbgpu.recipes.autoencoder.recipe:Autoencoder"
    VALIDATION_VALUES = ("loss", "psnr_db")
    LIVE_PICTURES = True
    WITHOUT_FILES = ("mni152", "phantoms")
    INPUTS = "a folder of NIfTI files, or a CSV or JSON list of them; 'mni152', 'phantoms'"
    TRIAL = "a template brain, 200 steps: 2 minutes on 2 CPU cores"
    ONLY_AT_START = ("pretrained",)
    PREDICTS = "latents, and reconstructions as NIfTI on the grid of the volumes"
    FROM_DATA = ("patch_size", "channels", "latent_channels")
    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("data", "phantoms"), "num_phantoms"),
        only(left_out("adversarial_after_epochs"), "adversarial_after"),
        only(none_of("data", "phantoms"), "patches_per_volume", "spacing"),
        only(none_of("data", "phantoms", "mni152"), "patient_pattern", "split", "image_channels"),
        only(one_of("perceptual", "spectral", "features"), "perceptual_weight"),
        only(
            one_of("perceptual", "features"),
            "perceptual_network",
            "perceptual_linear",
            "perceptual_slices",
            "perceptual_range",
        ),
        only(
            none_of("perceptual_network", "random"),
            "perceptual_linear",
            "perceptual_slices",
            "perceptual_range",
        ),
        only(
            given("adversarial_weight"),
            "adversarial_after",
            "adversarial_after_epochs",
            "discriminator_lr",
            "discriminator_channels",
            "discriminator_layers",
        ),
    )
    # Adam's first steps move every weight by the whole rate, and the more channels a layer has, the more its
    # output changes by that. With these rates and the default warm-up no step of a first training is above
    # its start; with 4e-3 and (32, 64) channels the loss goes from 0.53 to 3.5.
    #
    # For files the rate is a tenth of the guide's, at which its own project reports NaN. Its 1000 epochs take
    # one patch of each volume, and 60 epochs here take patches_per_volume.
    DEFAULTS_WITH: ClassVar[DefaultRules] = (
        defaults(widest("channels", 32), lr=1e-3),
        defaults(widest("channels", 64), lr=5e-4),
        defaults(widest("channels", 128), lr=1e-4),
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

    recipe: Literal["autoencoder"] = "autoencoder"
    """the recipe"""
    lr: Annotated[float, TrainConfig.model_fields["lr"]] = 4e-3
    data: str = Field("mni152", json_schema_extra=control("Data", "Data") | read_from(*WITHOUT_FILES))
    """'mni152' (nilearn's template brain), 'phantoms' (generated ellipsoids), a folder of NIfTI files, or a
    CSV or JSON list of them"""
    patch_size: Annotated[int | tuple[int, ...], Each(ge=0, le=512, multiple_of=4)] = Field(
        32, json_schema_extra=control("Data", "Patch size", unit="voxels")
    )
    """edge of the patches in voxels, or one number for each axis (right, front, top), such as 112 128 80; 0
    for cubes as large as the files' volumes and the memory allow"""
    spacing: Annotated[float | tuple[float, ...] | None, Each(gt=0, le=100)] = Field(
        None, json_schema_extra=control("Data", "Voxel size", unit="mm")
    )
    """voxel size in mm to which volumes are resampled, or one number for each axis (right, front, top), such
    as 1.1; left out: as each file has it"""
    image_channels: Annotated[tuple[int, ...], Each(ge=0, le=4095)] = Field(
        (), json_schema_extra=control("Data", "Image channels") | shape_of_model()
    )
    """channels to train on of files with four dimensions, numbered from 0, such as 0 for the first; left out:
    files have one channel"""
    patches_per_volume: int = Field(16, ge=1, le=4096)
    """random patches that one volume gives in one epoch"""
    patient_pattern: str = Field("", json_schema_extra=divides_the_data())
    """regular expression whose first group names the patient in a file's path, such as '(case_[0-9]+)'; left
    out: the names of BIDS and BraTS, or a column 'patient' of the list, else each file by itself. All files
    of a patient are in the same part"""
    num_phantoms: int = Field(512, ge=4, le=1_000_000)
    """phantoms generated where data='phantoms'"""
    channels: tuple[int, ...] = Field((8, 16), max_length=5, json_schema_extra=shape_of_model())
    """feature channels at each resolution, finest first; () for three resolutions with as many as the memory
    allows, for files"""
    latent_channels: int = Field(2, ge=0, le=64, json_schema_extra=shape_of_model())
    """channels of the latent volume; 0 for as many as go with channels, for files"""
    num_res_blocks: Annotated[int | tuple[int, ...], Each(ge=1, le=8)] = Field(
        1, json_schema_extra=shape_of_model()
    )
    """residual blocks at each resolution, or one number for each, finest first"""
    norm_groups: int = Field(1, ge=1, le=64, json_schema_extra=shape_of_model())
    """groups of each GroupNorm; it must divide every number in channels"""
    attention_levels: tuple[bool, ...] = Field((), json_schema_extra=shape_of_model())
    """whether there is self-attention at each resolution, finest first, such as False False True; () for
    none"""
    with_encoder_nonlocal_attn: bool = Field(False, json_schema_extra=shape_of_model())
    """self-attention between two residual blocks at the end of the encoder"""
    with_decoder_nonlocal_attn: bool = Field(False, json_schema_extra=shape_of_model())
    """self-attention between two residual blocks at the beginning of the decoder"""
    upsampling: Literal["nearest", "trilinear"] = Field("nearest", json_schema_extra=shape_of_model())
    """how the decoder doubles the resolution before a convolution: as MONAI's AutoencoderKL, or as MAISI's"""
    pretrained: str = Field("", json_schema_extra=control("Model", "Pretrained weights") | read_from())
    """file with the network's first weights, .safetensors or of torch.save: of MONAI's AutoencoderKL, also
    MAISI's or of MONAI's older package generative; empty for none"""
    recon_loss: Literal["l1", "l2"] = "l2"
    """reconstruction loss; l2 is what PSNR measures, l1 keeps edges sharper"""
    kl_weight: float = Field(1e-7, ge=0, le=1)
    """weight of the KL term, summed over a sample's latent volume"""
    perceptual: Literal["none", "spectral", "features"] = "none"
    """a distance beside recon_loss: 'spectral' compares the amplitudes of frequencies, 'features' what a
    frozen network makes of both"""
    perceptual_weight: float = Field(0.1, gt=0, le=1000)
    """weight of that distance"""
    perceptual_network: str = Field("random", min_length=1, json_schema_extra=read_from("random"))
    """weights for perceptual='features': 'random' for two layers of random filters, or a local file: of
    torchvision's alexnet, vgg16 or squeezenet1_1 (LPIPS), of MedicalNet's ResNet-10 or ResNet-50, or of 3D
    convolutions; the file's names and shapes say which (docs/recipes/autoencoder.md)"""
    perceptual_linear: str = Field("", json_schema_extra=read_from())
    """LPIPS's own file for the network: alex.pth, vgg.pth or squeeze.pth; empty: that beside
    perceptual_network"""
    perceptual_slices: float = Field(0.5, gt=0, le=1)
    """share of a batch's slices, drawn again along each of the three axes in each step, that a network of
    LPIPS compares"""
    perceptual_range: Literal["symmetric", "unit"] = "symmetric"
    """values that a network of LPIPS gets: 'symmetric' for -1 to 1, as LPIPS defines them, 'unit' for 0 to 1,
    as MONAI's PerceptualLoss passes such images on"""
    adversarial_weight: float = Field(0.0, ge=0, le=100)
    """weight of the loss term for deceiving a discriminator, which learns to tell reconstructions from
    images, such as 0.01; 0 for no discriminator"""
    adversarial_after: int = Field(100, ge=0, le=10_000_000)
    """steps before the discriminator takes part"""
    adversarial_after_epochs: float | None = Field(None, gt=0, le=1_000_000)
    """epochs before the discriminator takes part, also a part of one; in place of adversarial_after"""
    discriminator_lr: float = Field(1e-3, gt=0, le=10, json_schema_extra=steered("step"))
    """peak learning rate of the discriminator, which follows the model's schedule"""
    discriminator_channels: int = Field(16, ge=1, le=1024, json_schema_extra=shape_of_model())
    """feature channels of the discriminator's first layer; each next one has twice as many"""
    discriminator_layers: int | None = Field(None, ge=1, le=8, json_schema_extra=shape_of_model())
    """layers of the discriminator between its first and its last; left out: 3, or as many as a patch has
    voxels for"""

    @property
    def samples_per_volume(self) -> int:
        return 1 if self.data == "phantoms" else self.patches_per_volume

    @property
    def why_losses_differ(self) -> str:
        """Return a sentence for the charts that names the loss terms of a training step that a validation
        lacks; empty if both have the reconstruction loss alone."""
        uses_term = {
            "the KL term": self.kl_weight > _NEGLIGIBLE_KL_WEIGHT,
            "the perceptual distance": self.perceptual != "none",
            "the adversarial term": self.adversarial_weight > 0,
        }
        terms = " and ".join(term for term, is_used in uses_term.items() if is_used)
        return (
            f"The loss of a step also has {terms}; that of a validation is the reconstruction's alone."
            if terms
            else ""
        )

    @property
    def patch(self) -> tuple[int, int, int]:
        """The edges of a patch in voxels, to the right, front and top."""
        first, second, third = (int(edge) for edge in _per_axis(self.patch_size))
        return first, second, third

    @property
    def spacing_mm(self) -> tuple[float, ...]:
        """The voxel size along the axes right, front and top; empty for that of each file."""
        return () if self.spacing is None else _per_axis(self.spacing)

    @property
    def num_image_channels(self) -> int:
        """The number of channels of the images."""
        return len(self.image_channels) or 1

    @property
    def voxels_per_latent(self) -> int:
        """The number of voxels per latent voxel along each axis."""
        return int(2 ** max(0, len(self.channels) - 1))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """The shape of a patch's latent volume, without its channels."""
        first, second, third = (edge // self.voxels_per_latent for edge in self.patch)
        return first, second, third

    @property
    def res_blocks(self) -> tuple[int, ...]:
        """The number of residual blocks at each resolution, finest first."""
        given = self.num_res_blocks
        return given if isinstance(given, tuple) else (given,) * len(self.channels)

    @property
    def attention(self) -> tuple[bool, ...]:
        """Whether there is self-attention at each resolution, finest first."""
        return self.attention_levels or (False,) * len(self.channels)

    @property
    def has_attention(self) -> bool:
        """Whether there is self-attention anywhere in the network."""
        return any((*self.attention_levels, self.with_encoder_nonlocal_attn, self.with_decoder_nonlocal_attn))

    @property
    def num_discriminator_layers(self) -> int:
        """The value of `discriminator_layers`, or its default if it is left out."""
        if self.discriminator_layers is not None:
            return self.discriminator_layers
        return min(3, self._max_discriminator_layers)

    @property
    def _max_discriminator_layers(self) -> int:
        # Every layer but the last halves the patch, and 4 voxels of it must be left.
        return int(math.log2(min(self.patch))) - 2

    def problems(self) -> Iterator[str]:
        """Yield a message for each setting that is invalid beside the others, such as patches that the
        network's resolutions do not divide."""
        try:
            if self.patient_pattern and not re.compile(self.patient_pattern).groups:
                yield f"patient_pattern={self.patient_pattern!r} has no group, such as (case_[0-9]+)"
        except re.error as error:
            yield f"patient_pattern={self.patient_pattern!r} is not a regular expression: {error}"
        for name in self.FROM_DATA:
            if self.data in self.WITHOUT_FILES and not getattr(self, name):
                yield f"{name}={getattr(self, name)} leaves it to files, and data={self.data!r} has none. Give {name}"
        if self.patch_size and min(self.patch) < 8:
            yield f"patch_size={self.patch_size} must be at least 8"
        if len(self.channels) == 1:
            yield f"channels={self.channels} must be two resolutions or more"
        if (
            self.patch_size
            and self.discriminator_layers is not None
            and self.discriminator_layers > self._max_discriminator_layers
        ):
            yield (
                f"discriminator_layers={self.discriminator_layers} are too many for patch_size={self.patch_size}: at most "
                f"{self._max_discriminator_layers}"
            )
        for name, value in (("patch_size", self.patch_size), ("spacing", self.spacing)):
            if isinstance(value, tuple) and len(value) not in (1, 3):
                yield f"{name}={value} must be one number, or three: to the right, front and top"
        if len(set(self.image_channels)) < len(self.image_channels):
            yield f"image_channels={self.image_channels} names one twice"
        shrink = self.voxels_per_latent
        if any(edge % shrink for edge in self.patch):
            yield (
                f"patch_size={self.patch_size} must be a multiple of {shrink}, because {len(self.channels)} "
                f"channel levels halve it {len(self.channels) - 1} times"
            )
        yield from self._problems_of_network()

    def _problems_of_network(self) -> Iterator[str]:
        """Yield a message for each setting of the network that does not fit the others; `channels` sets the
        number of resolutions."""
        if min(self.channels, default=1) < 1:
            yield f"channels={self.channels} must all be at least 1"
        elif any(number % self.norm_groups for number in self.channels):
            yield f"channels={self.channels} must all be multiples of norm_groups={self.norm_groups}"
        if self.sdpa != "auto" and not self.has_attention:
            yield (
                f"sdpa={self.sdpa!r} is a kernel for attention, and the network has none. Leave it out, or set "
                "attention_levels, with_encoder_nonlocal_attn or with_decoder_nonlocal_attn"
            )
        if not self.channels:
            # The channels are chosen once the data are known, and then all settings are checked again.
            return
        num_levels = len(self.channels)
        if len(self.res_blocks) != num_levels:
            yield (
                f"num_res_blocks={self.num_res_blocks} must be one number, or {num_levels}, one for each of "
                f"channels={self.channels}"
            )
        if len(self.attention) != num_levels:
            yield (
                f"attention_levels={self.attention_levels} must be {num_levels} values, one for each of "
                f"channels={self.channels}, or left out"
            )


def _per_axis(value: float | tuple[float, ...]) -> tuple[float, ...]:
    """Return the value for each of three axes. A tuple of the wrong length is padded or cut, so that
    properties can be computed before `problems` refuses it."""
    values = value if isinstance(value, tuple) else (value,)
    return (*values, *values[-1:] * 2, 1, 1, 1)[:3]
