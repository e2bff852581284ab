"""Keeps NaN and Inf out of the weights, on every rank at the same step and without waiting.

A loss that is not finite makes the gradients of its rank not finite, and through DDP's all_reduce those of
all ranks. So every rank sees it in the norm of the gradient.

On a GPU the host would have to wait for the step to read the norm before the optimizer's step. So the device
decides, as with torch's GradScaler: a fused optimizer changes nothing where `found_inf` is 1. For other
optimizers, which a recipe may bring, the host has to wait.

The host reads the norm one step late, with the other numbers. By then the next step is in progress. If the
run is to stop, the device leaves that step out as well, so that the weights are still those from before the
bad step. Only if a norm was bad do the ranks exchange which rank had which bad value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbgpu.config import TrainConfig
from nbgpu.engine.group import exchange
from nbgpu.engine.model import optimizers
from nbgpu.engine.training.step_metrics import Readings

_SMALLEST_LOSS_SCALE = 1e-4
"""The smallest loss scale of fp16's GradScaler, which begins at 65536 and halves: below it the gradients are
at fault and not the scale. The bound is fairseq's (`min_loss_scale`)."""

DISCRIMINATOR_LOSS = "discriminator_loss"
"""The name of the loss of an adversarial recipe's second network among a step's numbers."""

_WHAT_TO_TRY = "Lower lr or clip_norm, or look in the loss for a log, a root or a division that meets 0"
_LOOK_AT_DATA = "Look at the data: what was read, or a transform, holds NaN or Inf"
_LEAVING_OUT = "; on_nonfinite='skip' leaves such steps out"


@dataclass(frozen=True)
class Verdict:
    """The message about a step whose update was left out, and whether the run stops."""

    text: str
    rank: int
    """The first rank that had a bad value; 0 if the loss was finite on every rank."""
    stop: bool


class Guard:
    """Leaves out the updates of steps whose loss or gradient is NaN or infinite.

    A step that is left out leaves weights, optimizer and buffers unchanged to the last bit, on all ranks. It
    counts as a step: the data and the schedule advance by one, so that both follow from the number of the
    step alone, and a run that is resumed takes the same course. If the run stops, the steps that were left
    out last do not count: the trainer goes back to the step that its weights belong to.

    With fp16, GradScaler lowers its scale after each overflow of the scaled gradient. Such a step is left out
    and is no failure, unless a loss was bad or the scale has become too small. The device cannot distinguish
    an overflow from a bad loss, so that it does not leave out the step after a bad loss.

    Args:
        config: its `on_nonfinite` and `max_nonfinite_skips`.
        device: the rank's.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.follow(config)
        self._num_left_out = torch.zeros((), dtype=torch.float32, device=device)
        self._num_bad = 0
        self._inputs: dict[str, Tensor] = {}

    def follow(self, config: TrainConfig) -> None:
        """Continue under other settings."""
        self._allowed = config.max_nonfinite_skips if config.on_nonfinite == "skip" else 0
        self._scales_loss = config.amp == "fp16"

    def look_at(self, batch: Mapping[str, Tensor]) -> None:
        """Record, on the device, whether a micro-batch holds NaN or Inf, so that the message about a bad loss
        can say whether the data are the cause."""
        for name, values in batch.items():
            if values.is_floating_point():
                # 0 times a finite sum is 0; 0 times anything else is NaN.
                zero_or_nan = 0 * values.sum(dtype=torch.float32)
                self._inputs[name] = self._inputs.get(name, 0) + zero_or_nan

    def start_of_backward(self, loss: Tensor) -> Tensor:
        """Return the gradient that the backward pass begins with: 1, or NaN for a bad loss, whose own
        gradient may be finite."""
        return 1 + 0 * loss.detach()

    def update(
        self,
        optimizers_to_step: Sequence[Optimizer],
        grad_norm: Tensor,
        buffers: Sequence[Tensor],
        buffers_before: Sequence[Tensor],
    ) -> Mapping[str, Tensor]:
        """Do one step of each of the optimizers, or none.

        Args:
            optimizers_to_step: the optimizers, with the gradients of all ranks.
            grad_norm: the norm of the gradients; the same on every rank.
            buffers: the model's.
            buffers_before: their values before the forward pass wrote to them.

        Returns:
            For each input of this step's batches, by name: 0, or NaN if it held NaN or Inf. `judge` gets it.
        """
        # No value is read on the host here: each decision is a bool tensor on the device. Once more steps in
        # a row were left out than are allowed, the run is to stop, and all later steps are left out too. With
        # fp16 most such steps are overflows and no failures, so that only the host counts failures (`judge`).
        leave_out = ~torch.isfinite(grad_norm)
        if not self._scales_loss:
            leave_out = leave_out | (self._num_left_out > self._allowed)
        self._num_left_out = torch.where(leave_out, self._num_left_out + 1, 0.0)
        for optimizer in optimizers_to_step:
            optimizers.step_unless(optimizer, leave_out)
        # The forward pass has already changed the running statistics of BatchNorm.
        for buffer, old in zip(buffers, buffers_before, strict=True):
            buffer.copy_(torch.where(leave_out, old, buffer))
        inputs, self._inputs = self._inputs, {}
        return inputs

    @property
    def has_left_out(self) -> Tensor:
        """Return whether the newest step was left out, as a bool on the device."""
        return self._num_left_out > 0

    @property
    def num_left_out(self) -> int:
        """Return the number of steps left out since the weights last moved. Waits for the device."""
        return int(self._num_left_out)

    def restore(self, num_left_out: int) -> None:
        """Continue from the state of another rank or of a checkpoint, before which this number of steps was
        left out in a row. The checkpoint's run may have allowed more of them than this one."""
        self._num_left_out.fill_(min(num_left_out, self._allowed))
        self._num_bad = 0 if self._scales_loss else min(num_left_out, self._allowed)

    @property
    def is_over(self) -> bool:
        """Return whether the device leaves out all further steps, because the run is to stop."""
        return not self._scales_loss and self.num_left_out > self._allowed

    def judge(
        self,
        step: int,
        values: Mapping[str, float],
        inputs: Readings,
        scaler: torch.amp.GradScaler,
        newest_step: int,
    ) -> Verdict | None:
        """Decide how the run continues after one of its steps; None if the step was good.

        Every rank calls it, with the same norm. A collective if the norm is not finite, and only then.

        Args:
            step: the step's number.
            values: `grad_norm` of all ranks, other norms, and the terms of this rank's loss.
            inputs: the result of `update`.
            scaler: its scale is checked if amp is fp16.
            newest_step: the step that was begun last.
        """
        grad_norm = values["grad_norm"]
        if math.isfinite(grad_norm):
            self._num_bad = 0
            return None
        terms = {name: value for name, value in values.items() if not name.endswith("grad_norm")}
        by_rank = exchange.gather(
            {
                # JSON has no NaN and no Infinity, so the values travel as text.
                "terms": {name: str(value) for name, value in terms.items() if not math.isfinite(value)},
                "inputs": [name for name, value in inputs.values().items() if not math.isfinite(value)],
            }
        )
        # A bad loss of the model makes its discriminator's loss bad too, so the model's is the cause.
        is_models = any("loss" in bad["terms"] for bad in by_rank)
        loss = "loss" if is_models else DISCRIMINATOR_LOSS
        ranks = [rank for rank, bad in enumerate(by_rank) if loss in bad["terms"]]
        kept = f"weights are those of step {newest_step - self.num_left_out}"
        if self._scales_loss and not ranks:
            # An overflow of the scaled gradient.
            scale = scaler.get_scale()
            if scale >= _SMALLEST_LOSS_SCALE:
                return None
            overflow = f"the gradient overflows fp16 at step {step} even with a loss scale of {scale:.1g}"
            return Verdict(
                f"{overflow}; {kept}. Use amp='bf16' where the GPUs have it, or lower lr", 0, stop=True
            )
        self._num_bad += 1
        first = min(ranks, default=0)
        what = _describe_loss(loss, by_rank, ranks) if ranks else f"the norm of the gradient is {grad_norm}"
        if self._num_bad <= self._allowed:
            count = f"{self._num_bad} of at most {self._allowed} in a row"
            return Verdict(f"{what} at step {step}, which was left out ({count})", first, stop=False)
        # More than are allowed: the run stops.
        in_a_row = f", and no step since step {step - self._num_bad} was better" if self._num_bad > 1 else ""
        # Where the batch is bad, the learning rate has no part in it.
        advice = _LOOK_AT_DATA if any(by_rank[rank]["inputs"] for rank in ranks) else _WHAT_TO_TRY
        advice += "" if self._allowed else _LEAVING_OUT
        return Verdict(f"{what} at step {step}{in_a_row}; {kept}. {advice}", first, stop=True)


def _describe_loss(
    loss: str, by_rank: Sequence[Mapping[str, Mapping[str, str]]], ranks: Sequence[int]
) -> str:
    """Return a text such as 'loss is nan on rank 1 (kl: inf; its batch holds NaN or Inf in: image)'."""
    described = []
    for rank in ranks:
        terms = by_rank[rank]["terms"]
        more = [f"{name}: {value}" for name, value in terms.items() if name != loss]
        if by_rank[rank]["inputs"]:
            more.append(f"its batch holds NaN or Inf in: {', '.join(by_rank[rank]['inputs'])}")
        described.append(f"{terms[loss]} on rank {rank}" + (f" ({'; '.join(more)})" if more else ""))
    return f"{loss} is {', '.join(described)}"
