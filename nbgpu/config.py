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
from typing import Any, Literal, Self, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from nbgpu.errors import ConfigError


def control(group: str) -> Any:
    """Marks a field as shown in the control panel, under the heading `group`."""
    return {"control": group}


def shape_of_model() -> Any:
    """Marks a field that decides the shapes of the model's weights: a checkpoint fits only the same value."""
    return {"shapes_the_model": True}


class _Settings(BaseModel):
    """What all settings share: frozen, no unknown names, and errors that say what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Builds the settings, or raises a ConfigError with one line for every bad value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(explain(cls, error)) from None

    def changed(self, **values: Any) -> Self:
        """These settings with some values replaced, checked again as a whole."""
        return type(self).checked(**{**self.model_dump(), **values})


class ClusterConfig(_Settings):
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


class TrainConfig(_Settings):
    """What every training run has, whatever it trains."""

    recipe: str = Field("autoencoder", description="the workload")
    data: str = Field("", description="where the samples come from; each recipe says what it takes")
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
    amp: Literal["off", "bf16", "fp16"] = Field(
        "off",
        description="automatic mixed precision; fp16 scales the loss (GradScaler), bf16 needs no scaling",
        json_schema_extra=control("Run"),
    )
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
    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of every random choice")
    threads: int | None = Field(
        None,
        ge=1,
        le=512,
        description="CPU threads for each rank in this run; left out: as the cluster set them",
    )
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
    telemetry: bool = Field(
        True, description="write and send each step's numbers; off is for measuring its cost"
    )
    runs_dir: str = Field("nbgpu_runs", description="folder that gets one folder for each run")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.num_warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be smaller than steps={self.steps}")
        if self.replace_rate > 0 and self.cache_rate >= 1:
            raise ValueError(
                f"replace_rate={self.replace_rate} replaces nothing while cache_rate=1 keeps every volume; "
                "lower cache_rate, or set replace_rate=0"
            )
        return self

    @property
    def num_warmup_steps(self) -> int:
        """`warmup_steps`, or what stands for it where it is left out."""
        return self.steps // 20 if self.warmup_steps is None else self.warmup_steps

    def global_batch_size(self, world_size: int) -> int:
        """Samples that go into one optimizer step over all ranks."""
        return self.batch_size * world_size * self.accumulate


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

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        shrink = 2 ** (len(self.channels) - 1)
        if self.patch_size % shrink:
            raise ValueError(
                f"patch_size={self.patch_size} must be a multiple of {shrink}, because {len(self.channels)} "
                f"channel levels halve it {len(self.channels) - 1} times"
            )
        if min(self.channels) < 1:
            raise ValueError(f"channels={self.channels} must all be at least 1")
        return self


TRAIN_CONFIGS: dict[str, type[TrainConfig]] = {"autoencoder": AutoencoderConfig}
"""The settings of every recipe, by the recipe's name."""


def train_config(recipe: str, **values: Any) -> TrainConfig:
    """The checked settings of one recipe; ConfigError where the name or a value is wrong."""
    if recipe not in TRAIN_CONFIGS:
        raise ConfigError(f"recipe = {recipe!r} is not known. Recipes: {', '.join(sorted(TRAIN_CONFIGS))}")
    return TRAIN_CONFIGS[recipe].checked(recipe=recipe, **values)


def bounds(field: FieldInfo) -> str:
    """What values a field takes, in words: '1 to 4096', "'off', 'bf16' or 'fp16'", 'above 0, at most 10'."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        names = [repr(c) for c in choices]
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    limits = {
        k: getattr(m, k)
        for m in field.metadata
        for k in ("ge", "gt", "le", "lt", "multiple_of")
        if hasattr(m, k)
    }
    words = []
    if "ge" in limits and "le" in limits:
        words.append(f"{limits['ge']} to {limits['le']}")
    else:
        names_of = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        words += [f"{names_of[k]} {limits[k]}" for k in ("ge", "gt", "le", "lt") if k in limits]
    if "multiple_of" in limits:
        words.append(f"a multiple of {limits['multiple_of']}")
    return ", ".join(words)


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """A ValidationError in our words: one line for each bad field, with its value, bounds and a way out."""
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        field = model.model_fields.get(name)
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"{name} is not a setting of {model.__name__}. Settings: {', '.join(model.model_fields)}"
            )
        elif field is None:
            lines.append(str(problem["msg"]).removeprefix("Value error, "))
        else:
            allowed = bounds(field)
            fix = f"Give a value within: {allowed}" if allowed else str(problem["msg"])
            default = f" (default {field.default!r})" if field.default is not None else ", or leave it out"
            lines.append(
                f"{name} = {problem['input']!r} is not valid. {fix}{default}. It is: {field.description}."
            )
    return "\n".join(lines)


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


def control_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """(group, name, field) of every field that the control panel shows, in the order of the model."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "control" in extra:
            yield str(extra["control"]), name, field


def shapes_the_model(model: type[BaseModel]) -> list[str]:
    """The fields that a checkpoint and the run that goes on from it must have in common."""
    return [
        name
        for name, field in model.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and "shapes_the_model" in field.json_schema_extra
    ]


def markdown_table(model: type[BaseModel]) -> str:
    """The docs' table of a model: setting, default, values, meaning."""
    rows = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        values = bounds(field).replace("|", "\\|")
        rows.append(f"| `{name}` | `{field.default!r}` | {values} | {field.description} |")
    return "\n".join(rows)
