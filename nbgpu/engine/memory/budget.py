"""The memory of a training run: the part that it holds from step to step, the part that a step needs, and the
batch size that would have fitted.

Before the first step is completed, the memory of a whole step is computed from shapes
(engine/dry_run/fake_steps.py). In six runs under a limit of 1000 MiB all batch sizes that were suggested in
this way trained; estimated from the unfinished step, four of six were too large.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbgpu.config import TrainConfig
from nbgpu.engine.frames import is_library, is_ours
from nbgpu.engine.memory.usage import Usage, asked_in_words, peak_bytes, refused
from nbgpu.errors import ConfigError, OutOfMemoryError
from nbgpu.text.sizes import in_words

SPARE_BYTES = 96 * 2**20
"""The memory of a CPU rank that is kept free for a run's loggers and checkpoints, and for the kernels that
oneDNN creates and keeps for each shape, also for those of earlier tries."""
_BESIDE_SHAPES = 0.3
"""The scratch memory of kernels and the blocks that allocators keep, as a share of the tensors' memory in a
step. For the autoencoder on CPU ranks it was 0.1 to 0.2."""


@dataclass(frozen=True)
class Static:
    """The memory that a run holds from step to step, in bytes, independent of the batch size."""

    before_bytes: int
    """The process's memory before the run: the cells' variables, and on the CPU also Python's libraries."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    average_bytes: int = 0
    """The averaged weights (`ema_decay`)."""
    discriminator_bytes: int = 0
    """Everything that a discriminator holds."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        before_bytes: int,
        average: Iterable[Tensor] = (),
        discriminator: Iterable[Tensor] = (),
    ) -> Static:
        """Add up the memory of a run's tensors.

        Gradients count as allocated, because DDP's buckets hold them from the start; the optimizer's state
        appears with the first step.
        """
        state = (value for values in optimizer.state.values() for value in values.values())
        return cls(
            before_bytes=before_bytes,
            parameters_bytes=_num_bytes([*model.parameters(), *model.buffers()]),
            gradients_bytes=_num_bytes(p for p in model.parameters() if p.requires_grad),
            optimizer_bytes=_num_bytes(value for value in state if isinstance(value, Tensor)),
            average_bytes=_num_bytes(average),
            discriminator_bytes=_num_bytes(discriminator),
        )

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Need:
    """The memory that the steps of a run need for tensors, computed from their shapes, in bytes."""

    fixed_bytes: int
    """The part that is independent of the batch size."""
    sample_bytes: int
    """The part for each sample of a micro-batch."""

    def batch_size_that_fits(self, usage: Usage, held_bytes: int) -> int:
        """Return the largest batch size whose steps fit into the memory that `held_bytes` leaves free; 0 if
        not even one sample fits."""
        left_bytes = usage.could_have_bytes - held_bytes - self.fixed_bytes
        return max(0, int(left_bytes / (1 + _BESIDE_SHAPES)) // self.sample_bytes)


def batch_size_that_fits(batch_size: int, asked: int, usage: Usage, static: Static, had_fitted: bool) -> int:
    """Estimate the batch size that would have fitted: a sample needs (peak - static) / batch_size, and the
    memory besides the static one is available for samples.

    Args:
        batch_size: the batch size that did not fit.
        asked: the bytes that were requested last, and refused.
        usage: the memory of this process.
        static: the memory that the run holds from step to step.
        had_fitted: whether an earlier step had completed with this batch size. Otherwise a sample needs more
            than was observed, and at most half of the batch size is returned.

    Returns:
        0 if not even one sample would have fitted; always less than the batch size that did not fit.
    """
    most = batch_size - 1 if had_fitted else batch_size // 2
    needed_bytes = max(usage.peak_bytes, usage.used_bytes + asked) - static.total_bytes
    if needed_bytes <= 0:
        return most
    left_bytes = max(0, usage.could_have_bytes - static.total_bytes)
    return min(most, left_bytes * batch_size // needed_bytes)


def explain_run(
    error: BaseException,
    rank: int,
    step: int,
    shapes: Mapping[str, tuple[int, ...]],
    config: TrainConfig,
    device: torch.device,
    static: Static | None,
    need: Need | None = None,
    had_fitted: bool = False,
) -> OutOfMemoryError:
    """Return an error that explains why a training run ran out of memory, with a batch size that would have
    fitted.

    Args:
        error: the exception that torch or numpy raised.
        rank: this rank's number.
        step: optimizer steps done.
        shapes: the shapes of the batch that a step was processing, by name; empty between two steps.
        config: the run's settings.
        device: the rank's device.
        static: the memory held from step to step; None if the run had not reached its first step.
        need: the memory of a step, from shapes; None to estimate it from the steps that were done.
        had_fitted: whether a step was completed with this batch size, so that its memory was measured.
    """
    own_device = device
    device, asked = refused(error, own_device)
    if device != own_device:
        # The rank computes on a GPU, and the host's memory ran out. The need of a step there is not known.
        static = None
    usage = Usage.of(device)
    # On the CPU `Usage` has the present value only; the peak is counted apart.
    usage = replace(usage, peak_bytes=max(usage.peak_bytes, peak_bytes(device)))
    when = f"in step {step + 1}" if shapes else f"after step {step}" if step else "before the first step"
    batch = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in shapes.items())
    settings = f"batch_size={config.batch_size}, accumulate={config.accumulate}"
    lines = [
        f"rank {rank} ran out of memory {when}, with {settings}" + (f": a batch of {batch}" if batch else ""),
        f"asked for: {asked_in_words(asked)}{_place(error)}",
        f"peak: {usage.in_words(device)}",
    ]
    if static is not None:
        rest_bytes = max(0, usage.peak_bytes - static.total_bytes)
        lines.append(
            f"held by: parameters {in_words(static.parameters_bytes)}, gradients {in_words(static.gradients_bytes)}, "
            f"optimizer state {in_words(static.optimizer_bytes)}, "
            + (f"averaged weights {in_words(static.average_bytes)}, " if static.average_bytes else "")
            + (
                f"discriminator {in_words(static.discriminator_bytes)}, "
                if static.discriminator_bytes
                else ""
            )
            + f"activations and the rest {in_words(rest_bytes)}; "
            f"before the run {in_words(static.before_bytes)}"
        )
        fits = batch_size_that_fits(config.batch_size, asked, usage, static, had_fitted)
        if need is not None:
            spare_bytes = SPARE_BYTES if device.type == "cpu" else 0
            fits = min(fits, need.batch_size_that_fits(usage, static.before_bytes + spare_bytes))
        lines.append(advice(config, fits, had_fitted or need is not None, device.type == "cuda"))
    else:
        what = "a smaller model or less data" if device == own_device else "fewer or smaller caches of data"
        lines.append(f"Give it {what}, or free what the cells hold: del NAME")
    lines.append("The run's memory was freed, and nothing was tried again")
    return OutOfMemoryError("\n".join(lines))


def advice(config: TrainConfig, fits: int, is_known: bool, on_gpu: bool) -> str:
    """Return the line that names a batch size that would have fitted, and other settings that save memory.

    Args:
        config: the run's settings.
        fits: that batch size; 0 for none.
        is_known: whether the memory of a whole step is known.
        on_gpu: whether the rank computes on a GPU.
    """
    amp = "auto" if on_gpu else "bf16"
    saves = config.amp == "off" and config.dtype != "float64" and _are_accepted(config, amp=amp)
    others = [
        *([f"{amp=}"] if saves else []),
        *(["a smaller patch_size"] if "patch_size" in type(config).model_fields else []),
        "a smaller model",
    ]
    if fits < 1:
        which = (
            "not even batch_size=1, by an estimate" if config.batch_size > 1 else "not even this one sample"
        )
        return f"would have fitted: {which}. Try {', or '.join(others)}"
    # Rounded up, so that a step has at least as many samples as before.
    accumulate = -(-config.batch_size * config.accumulate // fits)
    as_many = (
        f"; with accumulate={accumulate} about as many samples go into a step"
        if _are_accepted(config, batch_size=fits, accumulate=accumulate)
        else ""
    )
    return (
        f"would have fitted: batch_size={fits}, by an estimate from what a sample takes"
        f"{'' if is_known else ' as far as the step had come'}{as_many}. Or try {', or '.join(others)}"
    )


def _are_accepted(config: TrainConfig, **values: Any) -> bool:
    """Return whether the run's settings can be changed to these values, and would not be without effect."""
    try:
        config.changed(**values)
    except ConfigError:
        return False
    return True


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _place(error: BaseException) -> str:
    """Return the place in the recipe, or in the person's own code that it calls, where the memory was
    requested."""
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside_libraries = [
        f", in {code.co_name} ({Path(code.co_filename).name}, line {line})"
        for code, line in places
        if not is_library(code.co_filename) or is_ours(code.co_filename)
    ]
    return outside_libraries[-1] if outside_libraries else ""
