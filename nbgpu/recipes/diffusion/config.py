"""The settings of the recipe diffusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nbgpu.config.conditions import DefaultRules, Rules, defaults, given, none_of, one_of, only, widest
from nbgpu.config.settings import control, read_from, shape_of_model
from nbgpu.config.training import TrainConfig


class DiffusionConfig(TrainConfig):
    """Make one modality of a brain from the other three, by diffusion in a few steps (Fast-DDPM)."""

    IMPLEMENTATION = "nbgpu.recipes.diffusion.recipe:Diffusion"
    VALIDATION_VALUES = ("loss", "psnr_db")
    WITHOUT_FILES = ("phantoms",)
    VOLUME = "case"
    INPUTS = "a folder of BraTS (2023, before, or the Decathlon's Task01); 'phantoms'"
    TRIAL = "320 generated heads, 200 steps: 1 minute on 2 CPU cores"
    PREDICTS = "the missing modality as NIfTI, on the grid of the others"
    AT_PREDICTION = ("sampler", "spacing", "sampling_steps", "eta", "variance", "clip", "seed")
    UNUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("intensity_prob", "intensity_strength"),
        "one modality's brightness is told from the others', so that it cannot be changed alone",
    )
    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("data", "phantoms"), "num_phantoms"),
        only(none_of("data", "phantoms"), "fit", "split"),
        only(given("attention_edges"), "sdpa"),
        only(none_of("betas", "cosine"), "beta_start", "beta_end"),
        only(one_of("spacing", "uniform", "uniform-from-0"), "sampling_steps"),
        only(one_of("sampler", "ddim"), "eta"),
        only(one_of("sampler", "posterior"), "variance"),
    )
    # With (32, 64) channels and a learning rate of 4e-3, the loss rises to twice its first value.
    DEFAULTS_WITH: ClassVar[DefaultRules] = (
        defaults(widest("channels", 64), lr=2e-3),
        defaults(widest("channels", 128), lr=1e-3),
    )

    recipe: Literal["diffusion"] = "diffusion"
    """the recipe"""
    batch_size: Annotated[int, TrainConfig.model_fields["batch_size"]] = 4
    lr: Annotated[float, TrainConfig.model_fields["lr"]] = 4e-3
    data: str = Field(
        "phantoms", min_length=1, json_schema_extra=control("Data", "Data") | read_from(*WITHOUT_FILES)
    )
    """'phantoms' (generated heads with a tumour and noise), or a folder of BraTS"""
    target: Literal["t1n", "t1c", "t2w", "t2f"] = Field(
        "t2f", json_schema_extra=control("Data", "Modality to make")
    )
    """the modality that is made from the others"""
    size: int | None = Field(
        None, ge=8, le=512, json_schema_extra=control("Data", "Edge of the volumes", unit="voxels")
    )
    """edge of the cubic volumes in voxels; left out: 16 for phantoms, 128 for files"""
    fit: Literal["resize", "crop"] = "resize"
    """how a file's volume becomes a cube: the brain's box resampled to it, or its middle at the file's own
    resolution, cut or padded"""
    num_phantoms: int = Field(320, ge=4, le=1_000_000)
    """heads generated where data='phantoms'"""
    val_cases: int = Field(16, ge=1, le=100_000)
    """held-out cases that a validation samples, over all ranks; the result takes twice as many"""
    prediction: Literal["epsilon", "x0", "v"] = Field(
        "x0", json_schema_extra=control("Diffusion", "Network predicts")
    )
    """what the network predicts from a noisy image: its noise, as in the paper, the clean image, which learns
    faster, or their difference v"""
    spacing: Literal["uniform", "uniform-from-0", "non-uniform", "all"] = Field(
        "uniform", json_schema_extra=control("Diffusion", "Times of sampling")
    )
    """times that sampling visits: 0, 99, 199, ..., 999 (11); 0, 100, ..., 900 (10); 0, 199, 399, 599, 699,
    799, 849, 899, 949, 999 (10); or every one"""
    sampling_steps: int | None = Field(
        None, ge=2, le=10_000, json_schema_extra=control("Diffusion", "Sampling steps")
    )
    """how often sampling evaluates the network; left out: 11, and 10 for 'uniform-from-0'"""
    train_times: Literal["sampled", "all"] = "sampled"
    """times to train on: those that sampling visits (Fast-DDPM), or every one (DDPM)"""
    antithetic: bool = True
    """the times of a step's samples, over all ranks and micro-batches, come in pairs, an early and a late
    one, instead of each by itself"""
    num_times: int = Field(1000, ge=2, le=10_000)
    """times from the clean image to noise"""
    betas: Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"] = "linear_beta"
    """MONAI's schedule of the noise that each time adds"""
    beta_start: float = Field(1e-4, gt=0, lt=1)
    """variance that the first time adds"""
    beta_end: float = Field(0.02, gt=0, lt=1)
    """variance that the last time adds"""
    sampler: Literal["ddim", "posterior"] = "ddim"
    """the step between two times: DDIM's, with eta, or DDPM's draw from the posterior, with variance"""
    eta: float = Field(0.0, ge=0, le=1)
    """noise of DDIM's steps: 0 for none, 1 for the posterior's"""
    variance: Literal["small", "large"] = "small"
    """variance with which the posterior is drawn: its own, or beta of the step, which is larger"""
    clip: bool = True
    """cut each predicted image to -1..1 while sampling"""
    channels: tuple[int, ...] = Field((8, 16), min_length=2, max_length=6, json_schema_extra=shape_of_model())
    """feature channels at each resolution, finest first"""
    num_res_blocks: int = Field(1, ge=1, le=8, json_schema_extra=shape_of_model())
    """residual blocks at each resolution"""
    attention_edges: tuple[int, ...] = Field((), json_schema_extra=shape_of_model())
    """resolutions with self-attention, as edges of the cube in voxels, such as (16,); () for none"""
    norm_groups: int = Field(4, ge=1, le=64, json_schema_extra=shape_of_model())
    """groups of each GroupNorm"""

    @property
    def edge(self) -> int:
        """The value of `size`, or its default where it is left out."""
        return self.size or (16 if self.data == "phantoms" else 128)

    def problems(self) -> Iterator[str]:
        """Yield a message for each contradiction between settings of the network, of the noise schedule, and
        of the times that sampling visits."""
        shrink = 2 ** (len(self.channels) - 1)
        if self.edge % shrink:
            yield (
                f"size={self.edge} must be a multiple of {shrink}, because {len(self.channels)} channel levels halve it "
                f"{len(self.channels) - 1} times"
            )
        if any(number < 1 or number % self.norm_groups for number in self.channels):
            yield f"channels={self.channels} must all be multiples of norm_groups={self.norm_groups}"
        edges = [self.edge // 2**level for level in range(len(self.channels))]
        if wrong := sorted(set(self.attention_edges) - set(edges)):
            yield f"attention_edges={wrong} are not resolutions of the network. It has the edges {edges}"
        if self.spacing == "non-uniform" and self.num_times != 1000:
            yield f"spacing='non-uniform' names times out of 1000, and num_times is {self.num_times}"
        if (self.sampling_steps or 2) > self.num_times:
            yield f"sampling_steps={self.sampling_steps} must be at most num_times={self.num_times}"
        elif self.sampling_steps is None and self.num_times < 11 and self.spacing != "all":
            yield f"num_times={self.num_times} is less than the default's 11 steps. Give sampling_steps, or spacing='all'"
        elif self.spacing == "uniform" and 2 * ((self.sampling_steps or 2) - 1) > self.num_times:
            yield (
                f"sampling_steps={self.sampling_steps} must be at most {self.num_times // 2 + 1} with spacing='uniform' and "
                f"num_times={self.num_times}. Take fewer, or spacing='uniform-from-0' or 'all'"
            )
        if self.beta_start > self.beta_end:
            yield f"beta_start={self.beta_start} must not be above beta_end={self.beta_end}"
