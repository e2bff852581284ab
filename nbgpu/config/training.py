"""The settings that every run has, whatever it trains, in groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from nbgpu.config import own_file
from nbgpu.config.conditions import Rules, given, left_out, one_of, only
from nbgpu.config.data import DataSettings
from nbgpu.config.settings import Settings, control, shape_of_model, steered

_LEAST_WARMUP_STEPS = 10
_PROFILE_WINDOW = re.compile(r"(\d+):(\d+)")
_SMOKE_TEST_SAMPLES = 8
MAX_PROFILED_STEPS = 100
"""A step adds some thousands of events to a trace, and a browser must be able to show them."""


class LoopSettings(Settings):
    """How long, in what portions and from where a run trains."""

    REPLACES: ClassVar[Mapping[str, str]] = {"epochs": "steps", "global_batch_size": "batch_size"}

    recipe: str = "autoencoder"
    """the recipe"""
    steps: int = Field(200, ge=1, le=10_000_000, json_schema_extra=control("Run", "Steps"))
    """optimizer steps in all"""
    batch_size: int = Field(
        2, ge=1, le=4096, json_schema_extra=control("Run", "Batch size", unit="per rank") | steered("epoch")
    )
    """samples for each rank and micro-batch"""
    accumulate: int = Field(
        1, ge=1, le=1024, json_schema_extra=control("Run", "Accumulate over", unit="micro-batches")
    )
    """micro-batches whose gradients are added up before each optimizer step"""
    global_batch_size: int | None = Field(None, ge=1, le=2**24)
    """samples that go into one optimizer step over all ranks; where it is given, batch_size follows from it,
    and it must be a multiple of ranks x accumulate"""
    epochs: int | None = Field(None, ge=1, le=10_000_000, json_schema_extra=control("Run", "Epochs"))
    """passes over the training data in all; where it is given, steps follows from it"""
    seed: int = Field(0, ge=0, le=2**31 - 1)
    """seed of every random choice"""
    threads: int | None = Field(None, ge=1, le=512)
    """CPU threads for each rank in this run; left out: as the cluster set them"""
    smoke_test: bool = Field(False, json_schema_extra=control("Run", "Smoke test"))
    """before a long run: two samples a rank, three steps, a validation and a checkpoint, with all checks on
    (docs/training.md); overrides steps, batch_size and everything else that would make it long"""

    def samples_per_step(self, world_size: int) -> int:
        """Return the samples that go into one optimizer step over all ranks."""
        return self.batch_size * world_size * self.accumulate

    @property
    def samples_per_volume(self) -> int:
        """The number of samples that an epoch takes from one volume."""
        return 1

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the total number of optimizer steps; 0 if the length is given in epochs and the data have
        not been read yet (`steps_per_epoch` is 0)."""
        return self.steps if self.epochs is None else self.epochs * steps_per_epoch


class OptimizerSettings(Settings):
    """From the gradient to the weights."""

    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("optimizer", "sgd"), "momentum"),
        only(left_out("warmup_epochs"), "warmup_steps"),
        only(one_of("lr_scaling", "sqrt", "linear"), "lr_batch_size"),
        only(one_of("schedule", "cosine", "step", "plateau"), "min_lr"),
        only(one_of("schedule", "step", "plateau"), "lr_decay"),
        only(one_of("schedule", "step"), "lr_decay_every"),
        only(one_of("schedule", "plateau"), "plateau_patience"),
    )

    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        "adamw", json_schema_extra=control("Optimizer", "Optimizer") | shape_of_model()
    )
    """torch's fused optimizer; a checkpoint holds its state, and fits the same one only"""
    lr: float = Field(
        1e-3, gt=0, le=10, json_schema_extra=control("Optimizer", "Learning rate") | steered("step")
    )
    """peak learning rate, before lr_scaling"""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """factor on lr where a step has more samples than lr_batch_size: none, the square root of the ratio (for
    Adam; Malladi et al. 2022), or the ratio itself (for SGD; Goyal et al. 2017)"""
    lr_batch_size: int | None = Field(None, ge=1, le=2**24)
    """the global batch size that lr is meant for"""
    momentum: float = Field(0.9, ge=0, lt=1)
    """share of the last update that the next one keeps"""
    weight_decay: float = Field(
        0.01, ge=0, le=10, json_schema_extra=control("Optimizer", "Weight decay") | steered("step")
    )
    """weight decay; decoupled from the gradient with adamw"""
    clip_norm: float = Field(
        1.0, ge=0, le=1e6, json_schema_extra=control("Optimizer", "Clip gradient norm at") | steered("step")
    )
    """largest norm of the whole gradient; 0 leaves it as it is"""
    clip_value: float = Field(0.0, ge=0, le=1e6, json_schema_extra=steered("step"))
    """largest absolute value of each element of the gradient, cut before clip_norm; 0 leaves them"""
    ema_decay: float = Field(
        0.0, ge=0, lt=1, json_schema_extra=control("Optimizer", "Average of the weights", unit="decay")
    )
    """share that each step keeps of an average of the weights over the steps, such as 0.999; validation and
    result then use the average, and checkpoints have both; 0 for no average"""
    schedule: Literal["constant", "cosine", "step", "plateau"] = Field(
        "cosine", json_schema_extra=control("Optimizer", "Learning rate schedule")
    )
    """how the learning rate changes after the warm-up; cosine: it falls to min_lr at the last step; step: it
    is multiplied by lr_decay every lr_decay_every steps; plateau: so it is when the validation loss no longer
    falls"""
    warmup_steps: int | None = Field(None, ge=0, le=1_000_000)
    """steps over which the learning rate rises from 0 to lr; left out: a twentieth of all steps, and at least
    10, but no more than half of them"""
    warmup_epochs: float | None = Field(None, gt=0, le=1_000_000)
    """epochs over which the learning rate rises from 0 to lr, also a part of one; in place of warmup_steps"""
    min_lr: float = Field(0.0, ge=0, le=10)
    """the learning rate below which the schedule does not go"""
    lr_decay: float = Field(0.5, gt=0, lt=1)
    """the factor by which the schedule lowers the learning rate"""
    lr_decay_every: int = Field(1000, ge=1, le=10_000_000)
    """steps between two multiplications by lr_decay"""
    plateau_patience: int = Field(5, ge=0, le=10_000)
    """validations in a row without a better loss before the learning rate is multiplied by lr_decay"""

    def problems(self) -> Iterator[str]:
        """Yield values of the learning rate that do not go together."""
        if self.min_lr > self.lr:
            yield f"min_lr={self.min_lr} must not be above lr={self.lr}"
        if self.lr_scaling != "none" and self.lr_batch_size is None:
            yield (
                f"lr_scaling={self.lr_scaling!r} needs lr_batch_size: the samples of a step, over all ranks and "
                f"micro-batches, for which lr={self.lr} is meant"
            )

    def peak_lr(self, samples_per_step: int) -> float:
        """Return the learning rate after the warm-up for steps of `samples_per_step` over all ranks."""
        if self.lr_scaling == "none":
            return self.lr
        assert self.lr_batch_size is not None, "`problems` requires it"
        ratio = samples_per_step / self.lr_batch_size
        return self.lr * (math.sqrt(ratio) if self.lr_scaling == "sqrt" else ratio)


class PrecisionSettings(Settings):
    """The numbers that are computed with, and what is done where they are none."""

    ONLY_WITH: ClassVar[Rules] = (only(one_of("on_nonfinite", "skip"), "max_nonfinite_skips"),)

    amp: Literal["off", "auto", "bf16", "fp16"] = Field(
        "off", json_schema_extra=control("Run", "Mixed precision") | steered("step")
    )
    """automatic mixed precision: 16 bits where that is safe, which takes less memory and time on most GPUs;
    fp16 scales the loss (GradScaler), bf16 needs no scaling; auto: bf16 where every rank has a GPU of compute
    capability 8.0 or newer, fp16 from 7.0 on, off on CPU ranks and where 16 bits do not go with the other
    settings"""
    dtype: Literal["float32", "float64"] = "float32"
    """type of the weights, and of the data on its way through the model"""
    tf32: bool | None = None
    """let GPUs of compute capability 8.0 or newer round the factors of float32 products to 10 bits (TF32), in
    convolutions and in matrix products, which is faster; left out: as torch does, in convolutions only"""
    cudnn: Literal["default", "benchmark", "deterministic"] = "default"
    """'benchmark' measures cuDNN's algorithms and takes the fastest, 'deterministic' takes those that give
    the same bits each time; they exclude each other"""
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """kernel of scaled_dot_product_attention; a kernel that cannot handle the model's shapes ends the run"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what to do when the loss or the gradient is NaN or infinite: end the run with the weights of the step
    before, or leave the step out and go on"""
    max_nonfinite_skips: int = Field(10, ge=1, le=10_000)
    """steps in a row that are left out before the run ends"""


class ParallelSettings(Settings):
    """How the model is spread over the ranks, and what is traded for speed or memory."""

    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("strategy", "fsdp"), "cpu_offload"),
        only(one_of("comm_hook", "powersgd"), "powersgd_rank"),
        only(
            one_of("strategy", "ddp"),
            *("static_graph", "find_unused_parameters", "broadcast_buffers"),
            *("gradient_as_bucket_view", "bucket_mb", "comm_hook"),
        ),
    )

    strategy: Literal["ddp", "fsdp", "single"] = Field(
        "ddp", json_schema_extra=control("Parallel", "Strategy")
    )
    """'ddp': every rank has the whole model, gradients are averaged; 'fsdp': weights, gradients and optimizer
    state are shared out (fully_shard, as ZeRO stage 3); 'single': one rank alone"""
    cpu_offload: bool = False
    """keep weights, gradients and optimizer state in host memory: less GPU memory, slower steps"""
    sync_batchnorm: bool = False
    """BatchNorm layers take their statistics over all ranks (SyncBatchNorm)"""
    static_graph: bool = False
    """let DDP rely on the same parameters taking part in every step"""
    find_unused_parameters: bool = False
    """let DDP look in each step for parameters that took no part; costs time"""
    broadcast_buffers: bool = True
    """rank 0's buffers, such as BatchNorm's statistics, go to all ranks in each step"""
    gradient_as_bucket_view: bool = True
    """keep gradients in the buckets that are sent, which saves a copy of them"""
    bucket_mb: float = Field(25.0, gt=0, le=10_000)
    """MiB of gradients that are sent as one message"""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """how gradients are sent: as they are, rounded to bf16 or fp16, or as their main directions (PowerSGD,
    Vogels et al. 2019), which takes fewer bytes"""
    powersgd_rank: int = Field(2, ge=1, le=1024)
    """directions of each matrix that are sent"""
    checkpoint_activations: bool = Field(
        False, json_schema_extra=control("Parallel", "Recompute activations")
    )
    """compute the model's blocks again in the backward pass, in place of keeping their activations: less
    memory, more time"""
    compile: bool = False
    """compile the model with torch.compile, which needs a C++ compiler; the first step takes a minute or
    so"""
    channels_last: bool = False
    """keep weights and volumes in the memory format channels_last_3d"""

    def problems(self) -> Iterator[str]:
        """Yield settings of DDP that exclude each other."""
        if self.static_graph and self.find_unused_parameters:
            yield "static_graph and find_unused_parameters exclude each other: set one of them"


class CheckpointSettings(Settings):
    """What is kept on the disk to go on from, and when a run ends early."""

    ONLY_WITH: ClassVar[Rules] = (
        only(given("best_metric"), "best_mode", "restore_best", "early_stop_patience"),
        only(given("early_stop_patience"), "early_stop_min_delta"),
    )

    checkpoint_every: int = Field(
        0,
        ge=0,
        le=1_000_000,
        json_schema_extra=control("Run", "Checkpoint every", unit="steps") | steered("step"),
    )
    """steps between checkpoints; 0 for one at the end only"""
    checkpoint_every_epochs: int = Field(0, ge=0, le=1_000_000)
    """epochs between checkpoints, beside those of checkpoint_every"""
    keep_checkpoints: int = Field(3, ge=1, le=10_000)
    """how many of the run's newest intact checkpoints stay on the disk"""
    best_metric: str = Field("", json_schema_extra=control("Run", "Keep the best by"))
    """validation value, such as 'loss', whose best checkpoint is kept beside the newest ones; empty for
    none"""
    best_mode: Literal["min", "max"] = "min"
    """whether the best value of best_metric is the smallest or the largest"""
    restore_best: bool = False
    """compute the result with the weights of the best validation (best_metric), not with those of the last
    step"""
    early_stop_patience: int = Field(
        0, ge=0, le=10_000, json_schema_extra=control("Run", "Stop early after", unit="validations")
    )
    """validations in a row without a better best_metric after which the run ends; 0 for never"""
    early_stop_min_delta: float = Field(0.0, ge=0, le=1e9)
    """by how much a value must be better to count for early_stop_patience"""
    resume: str = Field("", json_schema_extra=control("Run", "Resume from"))
    """where to go on: 'auto' for the newest intact checkpoint of this recipe in runs_dir (with run_name: of
    the runs of that name), a run's folder, that folder with '/best' for its best checkpoint, or a
    checkpoint's folder; empty to start from the beginning"""


class LogSettings(Settings):
    """What is written down of a run, and where."""

    ONLY_WITH: ClassVar[Rules] = (
        only(given("tensorboard"), "histograms_every"),
        only(one_of("wandb", "offline", "online"), "wandb_project", "wandb_entity", "wandb_name"),
    )

    FROM_SITE: ClassVar[Mapping[str, str]] = {"runs_dir": "runs_dir"}
    """The settings whose defaults an administrator may set, each with its row in the site's file."""

    log_every: int = Field(
        1,
        ge=1,
        le=1_000_000,
        json_schema_extra=control("Run", "Record every", unit="steps") | steered("step"),
    )
    """steps between two records of the numbers; every step is checked for NaN and Inf"""
    telemetry: bool = True
    """write each step's numbers and send them to the notebook; off is for measuring what that costs"""
    work_out_result: bool = True
    """compute the recipe's result of the trained model at the end, which may take long; off is for measuring
    steps"""
    runs_dir: str = "nbgpu_runs"
    """folder that gets one folder for each run"""
    run_name: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$|^$",
        json_schema_extra=control("Logs", "Name of the run"),
    )
    """name of the run, sweep or study, which its folder has between date and number; empty for the recipe's
    name"""
    tensorboard: bool = Field(False, json_schema_extra=control("Logs", "TensorBoard"))
    """write TensorBoard's files into the run's folder: scalars, and histograms of weights and gradients"""
    histograms_every: int = Field(100, ge=0, le=1_000_000)
    """steps between TensorBoard's histograms; 0 for none"""
    wandb: Literal["off", "offline", "online"] = Field(
        "off", json_schema_extra=control("Logs", "Weights & Biases")
    )
    """log to Weights & Biases: into the run's folder, for `wandb sync` later, or at once over the network"""
    wandb_project: str = Field("nbgpu", min_length=1)
    """W&B's project"""
    wandb_entity: str = ""
    """W&B's user or team; empty for the account's own"""
    wandb_name: str = ""
    """the run's name in W&B; empty for the name of the run's folder"""
    profile: str = Field("", json_schema_extra=control("Logs", "Profile", unit="steps"))
    """steps to profile, such as '10:20' for the steps 10 to 20; empty for none"""

    @property
    def profiled_steps(self) -> range:
        """The steps to profile, counted from 1; empty if `profile` names none."""
        match = _PROFILE_WINDOW.fullmatch(self.profile)
        return range(int(match[1]), int(match[2]) + 1) if match else range(0)

    def problems(self) -> Iterator[str]:
        """Yield invalid steps to profile, and loggers that would have no numbers to show."""
        loggers = [name for name in ("tensorboard", "wandb") if getattr(self, name) not in (False, "off")]
        if loggers and not self.telemetry:
            yield f"telemetry=False records nothing that {' and '.join(loggers)} could show; set telemetry=True"
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

    IMPLEMENTATION: ClassVar[str] = ""
    """The recipe's class as 'module:Class'. The ranks import it when they need it."""
    VALIDATION_VALUES: ClassVar[tuple[str, ...]] = ("loss",)
    """The names of the values that the recipe's `validate` returns; empty if they are known only at run
    time."""
    INPUTS: ClassVar[str] = ""
    """The values that `data` may have, in a few words."""
    WITHOUT_FILES: ClassVar[tuple[str, ...]] = ("",)
    """Values of `data` with which no file of the user is read."""
    TRIAL: ClassVar[str] = ""
    """A phrase on what a run with no flags does, and how long it takes."""
    UNUSED: ClassVar[Mapping[str, str]] = {}
    """Fields without meaning in the recipe, each with the reason. A value other than the default is
    refused."""
    LIVE_PICTURES: ClassVar[bool] = False
    """Whether runs of the recipe show images while they train."""
    PREDICTS: ClassVar[str] = ""
    """What `nbgpu predict` writes for a sample of new data, in a few words; empty if the recipe trains no
    model."""
    ONLY_AT_START: ClassVar[tuple[str, ...]] = ()
    """The settings that only determine the initial weights, so that the files that they name are no longer
    needed after training."""
    AT_PREDICTION: ClassVar[tuple[str, ...]] = ()
    """The settings that may differ between the training and the prediction."""
    FROM_DATA: ClassVar[tuple[str, ...]] = ()
    """Settings that nbgpu chooses by the data files and the memory if they are left out."""

    @property
    def why_losses_differ(self) -> str:
        """A sentence why the loss of a validation is not comparable with the loss of a step; empty if it is.

        Charts draw losses that are not comparable on separate axes, and show this sentence.
        """
        return ""

    def num_evaluated(self, num_samples: int) -> int:
        """Return how many of `num_samples` a validation or a result takes: all, or a few in a smoke test,
        which only tests whether they can be computed."""
        return min(num_samples, _SMOKE_TEST_SAMPLES) if self.smoke_test else num_samples

    @property
    def left_to_data(self) -> tuple[str, ...]:
        """The settings of `FROM_DATA` that are left out; empty for generated data."""
        if self.data in self.WITHOUT_FILES:
            return ()
        return tuple(name for name in self.FROM_DATA if not getattr(self, name))

    def problems(self) -> Iterator[str]:
        """Yield values from different groups of settings that do not go together."""
        if self.epochs is None and (self.warmup_steps or 0) >= self.steps:
            yield f"warmup_steps={self.warmup_steps} must be smaller than steps={self.steps}"
        if self.epochs is not None and (self.warmup_epochs or 0) >= self.epochs:
            yield f"warmup_epochs={self.warmup_epochs:g} must be smaller than epochs={self.epochs}"
        if self.static_graph and self.accumulate > 1:
            yield (
                f"static_graph does not go with accumulate={self.accumulate}: DDP fails where the first micro-batch is "
                "not synchronised (pytorch issue 143580). Set one of them"
            )
        if self.strategy == "fsdp" and self.amp == "fp16":
            yield "amp='fp16' does not go with strategy='fsdp': ranks would scale their losses differently. Take 'bf16'"
        if self.strategy == "fsdp" and self.optimizer == "sgd":
            yield "optimizer='sgd' does not go with strategy='fsdp': torch has no fused SGD for sharded weights"
        if self.dtype == "float64" and self.amp not in ("off", "auto"):
            yield f"amp={self.amp!r} does not go with dtype='float64'. Set one of them"
        if self.schedule == "plateau" and not self.validates:
            yield "schedule='plateau' looks at the validation loss, and val_every=0 makes none"
        if self.best_metric and not self.validates:
            yield f"best_metric={self.best_metric!r} is a value of validations, and val_every=0 makes none"
        metrics = self.VALIDATION_VALUES
        if self.best_metric and metrics and self.best_metric not in metrics:
            yield f"best_metric={self.best_metric!r} is not a value of this recipe's validation. Values: {', '.join(metrics)}"
        for name in sorted(self.UNUSED):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield f"{name}={value!r} means nothing in the recipe {self.recipe!r}: {self.UNUSED[name]}. Leave it out"
        if self.epochs is None and self.profiled_steps and self.profiled_steps[-1] > self.steps:
            yield f"profile={self.profile!r} goes beyond the last step; give steps up to steps={self.steps}"

    def warm_up_problem(self, total_steps: int, steps_per_epoch: int) -> str:
        """Return an error if the run ends before its warm-up does; else an empty string. This is checked when
        the data have been read, because only then the number of steps of `epochs` is known."""
        num_steps = self.num_warmup_steps(total_steps, steps_per_epoch)
        if num_steps < total_steps:
            return ""
        name = "warmup_steps" if self.warmup_epochs is None else "warmup_epochs"
        return (
            f"{name}={getattr(self, name)} is a warm-up of {num_steps} steps, and the whole run has {total_steps}. Give a "
            "shorter one"
        )

    @property
    def title(self) -> str:
        """The recipe's name for people and in folder names: for a user's file, its name without '.py'."""
        return Path(self.recipe).stem if own_file.is_file(self.recipe) else self.recipe

    @property
    def folder_title(self) -> str:
        """The part of the run's folder name between the date and the number that makes it unique."""
        return self.run_name or self.title

    @property
    def chosen_by_validation(self) -> tuple[str, ...]:
        """The settings by which results of validations determine the final weights."""
        chosen = {
            "restore_best": self.restore_best,
            "early_stop_patience": self.early_stop_patience > 0,
            "schedule='plateau'": self.schedule == "plateau",
        }
        return tuple(name for name, chooses in chosen.items() if chooses)

    def num_warmup_steps(self, total_steps: int, steps_per_epoch: int) -> int:
        """Return the number of steps over which the learning rate rises: `warmup_steps` or `warmup_epochs`,
        or a default if both are left out."""
        if self.warmup_epochs is not None:
            return max(1, round(self.warmup_epochs * steps_per_epoch))
        if self.warmup_steps is not None:
            return self.warmup_steps
        # Adam's first steps are as large as the learning rate, whatever the gradient, and in a short run a
        # twentieth would be too few steps to warm up.
        return min(max(total_steps // 20, _LEAST_WARMUP_STEPS), total_steps // 2)
