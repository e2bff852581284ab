"""Every setting, once. The command line, the control panel, TOML files and the table in the docs are read
off these models: a field that is added here shows up in all of them with no other edit.

A field says what it is in `description`, its bounds in `ge`/`le`/`Literal`, and through `control(...)` in
which group of the control panel it stands. A field with no control is for files and the command line only.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field

from nbgpu.errors import ConfigError
from nbgpu.settings import Settings, control, shape_of_model


class ClusterConfig(Settings):
    """Which devices get an engine, and how the engines talk."""

    gpus: str = Field(
        "auto",
        description="GPUs to use: 'auto' for all, 'none' for CPU ranks, or numbers and UUIDs separated by commas",
        json_schema_extra=control("Devices"),
    )
    ranks: int | None = Field(
        None,
        ge=1,
        le=64,
        description="number of ranks; left out: one for each GPU, or 2 CPU ranks where there is none",
        json_schema_extra=control("Devices"),
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="torch.distributed backend; 'auto' takes nccl on GPUs and gloo on CPUs"
    )
    threads_per_rank: int | None = Field(
        None, ge=1, le=512, description="CPU threads for each rank; left out: the host's cores / ranks"
    )
    keep: bool = Field(
        False,
        description="let the cluster and its run go on when the notebook's kernel ends; nbgpu.attach() rejoins",
    )
    share_gpus: bool = Field(False, description="take GPUs even where another cluster has them already")
    spare: int = Field(
        0,
        ge=0,
        le=16,
        description="engines that wait to take the place of a rank that dies; each holds memory, and no GPU until then",
    )
    start_timeout_s: float = Field(
        120.0, gt=0, le=3600, description="how long the engines may take to start, in seconds"
    )
    notice_after_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="seconds that ranks wait in a collective before a notice under the cell names who waits where; "
        "0 for never",
    )
    max_output_lines: int = Field(
        25_000,
        ge=10,
        le=1_000_000,
        description="lines of text, of 100 characters on average, that a cell shows; the full text of a cell that prints "
        "more is in a file for each rank, beside the runs",
    )
    debug: bool = Field(
        False,
        description="torch compares the ranks' collectives before each one (TORCH_DISTRIBUTED_DEBUG=DETAIL), so that "
        "different calls or shapes are named; slows every collective",
    )

    def threads_for(self, local_world_size: int) -> int:
        """CPU threads for each of `local_world_size` ranks on this host."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // local_world_size)


class LoopSettings(Settings):
    """How long, in what portions and from where a run trains."""

    recipe: str = Field("autoencoder", description="the workload")
    steps: int = Field(
        200, ge=1, le=10_000_000, description="optimizer steps in all", json_schema_extra=control("Run")
    )
    batch_size: int = Field(
        2,
        ge=1,
        le=4096,
        description="samples for each rank and micro-batch",
        json_schema_extra=control("Run"),
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=1024,
        description="micro-batches whose gradients are added up before each optimizer step",
        json_schema_extra=control("Run"),
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of every random choice")
    threads: int | None = Field(
        None,
        ge=1,
        le=512,
        description="CPU threads for each rank in this run; left out: as the cluster set them",
    )

    def global_batch_size(self, world_size: int) -> int:
        """Samples that go into one optimizer step over all ranks."""
        return self.batch_size * world_size * self.accumulate


class OptimizerSettings(Settings):
    """From the gradient to the weights."""

    lr: float = Field(
        1e-3, gt=0, le=10, description="peak learning rate of AdamW", json_schema_extra=control("Optimizer")
    )
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=10,
        description="AdamW's decoupled weight decay",
        json_schema_extra=control("Optimizer"),
    )
    clip_norm: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="largest norm of the whole gradient; 0 leaves it as it is",
        json_schema_extra=control("Optimizer"),
    )
    schedule: Literal["constant", "cosine"] = Field(
        "cosine",
        description="how the learning rate goes after the warm-up; cosine ends at 0",
        json_schema_extra=control("Optimizer"),
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps",
    )


class PrecisionSettings(Settings):
    """The numbers that are computed with, and what is done where they are none."""

    amp: Literal["off", "bf16", "fp16"] = Field(
        "off",
        description="automatic mixed precision; fp16 scales the loss (GradScaler), bf16 needs no scaling",
        json_schema_extra=control("Run"),
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="what to do when the loss or the gradient is NaN or infinite: end the run with the weights of the "
        "step before, or leave the step out and go on",
    )
    max_nonfinite_skips: int = Field(
        10,
        ge=1,
        le=10_000,
        description="steps in a row that on_nonfinite='skip' leaves out before the run ends",
    )


class DataSettings(Settings):
    """From the files to the batches."""

    data: str = Field("", description="where the samples come from; each recipe says what it takes")
    cache_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the rank's volumes kept decoded in host memory",
        json_schema_extra=control("Data"),
    )
    replace_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the cache replaced after each epoch; above 0 takes SmartCacheDataset",
        json_schema_extra=control("Data"),
    )
    val_fraction: float = Field(0.2, ge=0, lt=1, description="share of the samples held out for validation")
    val_every: int = Field(50, ge=0, le=1_000_000, description="steps between validations; 0 for none")

    def problems(self) -> Iterator[str]:
        if self.replace_rate > 0 and self.cache_rate >= 1:
            yield (
                f"replace_rate={self.replace_rate} replaces nothing while cache_rate=1 keeps every volume; "
                "lower cache_rate, or set replace_rate=0"
            )


class CheckpointSettings(Settings):
    """What is kept on the disk to go on from."""

    checkpoint_every: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="steps between checkpoints; 0 for one at the end only",
        json_schema_extra=control("Run"),
    )
    keep_checkpoints: int = Field(
        3, ge=1, le=10_000, description="how many of the run's newest whole checkpoints stay on the disk"
    )
    resume: str = Field(
        "",
        description="where to go on: 'auto' for the newest whole checkpoint of this recipe in runs_dir, a run's "
        "folder, or a checkpoint's; empty to start from the beginning",
        json_schema_extra=control("Run"),
    )


class LogSettings(Settings):
    """What is written down of a run, and where."""

    telemetry: bool = Field(
        True, description="write and send each step's numbers; off is for measuring its cost"
    )
    runs_dir: str = Field("nbgpu_runs", description="folder that gets one folder for each run")


# Pydantic lists the fields of the last base first.
class TrainConfig(
    LogSettings,
    CheckpointSettings,
    DataSettings,
    PrecisionSettings,
    OptimizerSettings,
    LoopSettings,
):
    """What every training run has, whatever it trains."""

    def problems(self) -> Iterator[str]:
        if self.num_warmup_steps >= self.steps:
            yield f"warmup_steps={self.warmup_steps} must be smaller than steps={self.steps}"

    @property
    def num_warmup_steps(self) -> int:
        """`warmup_steps`, or what stands for it where it is left out."""
        return self.steps // 20 if self.warmup_steps is None else self.warmup_steps


class AutoencoderConfig(TrainConfig):
    """MONAI's 3D AutoencoderKL on random patches of volumes."""

    recipe: Literal["autoencoder"] = Field("autoencoder", description="the workload")
    lr: float = Field(
        4e-3, gt=0, le=10, description="peak learning rate of AdamW", json_schema_extra=control("Optimizer")
    )
    data: str = Field(
        "mni152",
        description="'mni152' (nilearn's template brain), 'phantoms' (generated ellipsoids), a folder of NIfTI "
        "files, or a CSV or JSON list of them",
        json_schema_extra=control("Data"),
    )
    patch_size: int = Field(
        32,
        ge=8,
        le=512,
        multiple_of=4,
        description="edge of the cubic patches, in voxels",
        json_schema_extra=control("Data"),
    )
    patches_per_volume: int = Field(
        16, ge=1, le=4096, description="random patches that one volume gives in one epoch"
    )
    num_phantoms: int = Field(512, ge=4, le=1_000_000, description="phantoms generated where data='phantoms'")
    channels: tuple[int, ...] = Field(
        (8, 16),
        min_length=2,
        max_length=5,
        description="feature channels at each resolution, finest first",
        json_schema_extra=shape_of_model(),
    )
    latent_channels: int = Field(
        2, ge=1, le=64, description="channels of the latent volume", json_schema_extra=shape_of_model()
    )
    recon_loss: Literal["l1", "l2"] = Field(
        "l2", description="reconstruction loss; l2 is what PSNR measures, l1 keeps edges sharper"
    )
    kl_weight: float = Field(
        1e-7, ge=0, le=1, description="weight of the KL term, summed over a sample's latent volume"
    )

    def problems(self) -> Iterator[str]:
        shrink = 2 ** (len(self.channels) - 1)
        if self.patch_size % shrink:
            yield (
                f"patch_size={self.patch_size} must be a multiple of {shrink}, because {len(self.channels)} "
                f"channel levels halve it {len(self.channels) - 1} times"
            )
        if min(self.channels) < 1:
            yield f"channels={self.channels} must all be at least 1"


TRAIN_CONFIGS: dict[str, type[TrainConfig]] = {"autoencoder": AutoencoderConfig}
"""The settings of every recipe, by the recipe's name."""


def train_config(recipe: str, **values: Any) -> TrainConfig:
    """The checked settings of one recipe; ConfigError where the name or a value is wrong."""
    if recipe not in TRAIN_CONFIGS:
        raise ConfigError(f"recipe = {recipe!r} is not known. Recipes: {', '.join(sorted(TRAIN_CONFIGS))}")
    return TRAIN_CONFIGS[recipe].checked(recipe=recipe, **values)


def write_toml(path: Path, cluster: ClusterConfig, train: TrainConfig) -> None:
    """Writes both as the tables [cluster] and [train]; what is None is left out, which reads back the same."""
    tables = {
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "train": train.model_dump(mode="json", exclude_none=True),
    }
    path.write_text(tomli_w.dumps(tables))


def read_toml(path: Path, **overrides: Any) -> tuple[ClusterConfig, TrainConfig]:
    """Reads what `write_toml` wrote, or a person; ConfigError names the file and every bad value."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    unknown = sorted(set(tables) - {"cluster", "train"})
    if unknown:
        raise ConfigError(
            f"{path} has the unknown table(s) {', '.join(unknown)}. It may have [cluster] and [train]"
        )
    train: Mapping[str, Any] = {"recipe": "autoencoder"} | tables.get("train", {}) | overrides
    try:
        return ClusterConfig.checked(**tables.get("cluster", {})), train_config(**train)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None
