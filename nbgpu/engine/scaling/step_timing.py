"""Times the parts of a training step, on generated batches, with and without the exchange of gradients.

Steps without the exchange show when each of DDP's buckets is ready to be sent, and how long a rank computes.
Steps with it, by DDP or FSDP, show how much of the exchange the computation does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.group import ddp_objects, group, straggler, torch_settings
from nbgpu.engine.memory import usage as memory
from nbgpu.engine.model import build as models
from nbgpu.engine.model import precision, randomness, strategy
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.model.moments import Moment
from nbgpu.engine.model.parameter_groups import GroupedOptimizer
from nbgpu.engine.model.strategy import clip
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.recipe import Recipe
from nbgpu.errors import RunError

_NUM_WARM_UPS = 3
"""DDP rebuilds its buckets after the first step, in the order in which that step computed the gradients."""


@torch_settings.as_at_the_beginning()
def measure(settings: dict[str, Any], num_steps: int) -> dict[str, list[dict[str, Any]]]:
    """Time steps with and without the exchange. A collective.

    Args:
        settings: all fields of a TrainConfig with strategy 'ddp' or 'fsdp'.
        num_steps: the number of timed steps of each kind.

    Returns:
        By kind ('alone', 'together', 'alone again') a dict for each step, in seconds: `forward_s`,
        `backward_s`, `optimizer_s` (with clipping), `step_s`, `last_backward_s` (of the last of
        `micro_batches`); `buckets`: for each of DDP's buckets the time at which it was ready after the last
        backward pass began, and its bytes; `blocks`: for each block of the recipe its bytes and its time in
        one forward pass, 0 for a compiled model; `rest_bytes`, the bytes of weights outside of them.

    Raises:
        RunError: the recipe trains a discriminator, whose gradients DDP does not exchange.
    """
    member = group.membership()
    config = train_config(**settings)
    try:
        with randomness.seeded_run(config), precision.kernels(config):
            return {
                "alone": _steps(config, member.device, num_steps, exchange=False),
                "together": _steps(config, member.device, num_steps, exchange=True),
                # Other work on the machine may have changed what the first ones took.
                "alone again": _steps(config, member.device, num_steps, exchange=False),
            }
    finally:
        memory.free()


def _steps(config: TrainConfig, device: torch.device, num_steps: int, exchange: bool) -> list[dict[str, Any]]:
    """Time steps of a new model.

    Args:
        config: the settings.
        device: the rank's device.
        num_steps: the number of timed steps.
        exchange: whether gradients are exchanged, as the settings say; otherwise DDP only fills its buckets.

    Returns:
        The times of each step, as `_TimedSteps.take` returns them.
    """
    recipe: Recipe = by_name.load(config)
    if Discriminator.of(config, recipe, device) is not None:
        raise RunError("a step with a discriminator cannot be timed: set adversarial_weight=0")
    model = models.build(config, recipe, device)[0]
    blocks = list(recipe.blocks(model))
    buckets: list[tuple[Moment, int]] = []

    def record_bucket(bucket: Any) -> torch.futures.Future[Tensor]:
        """A communication hook of DDP that records when a bucket is ready, and sends nothing."""
        buckets.append((Moment(device), bucket.buffer().nbytes))
        return ddp_objects.sent_nowhere(bucket)

    # A lambda, because torch refuses a hook whose annotations are strings, as those of this module are.
    hook = None if exchange else lambda _, bucket: record_bucket(bucket)
    alone = config.counting(strategy="ddp", comm_hook="none", cpu_offload=False)
    spread = strategy.spread(config if exchange else alone, model, blocks, device, hook)
    try:
        steps = _TimedSteps(config, recipe, model, spread, device, buckets, blocks)
        # Begun with the steps, so that a simulated slow rank is not slowed down while it loads packages.
        straggler.begin()
        for _ in range(_NUM_WARM_UPS):
            steps.take()
        times = []
        for _ in range(num_steps):
            if not exchange:
                # All ranks compute at the same time, as with the exchange, so that they compete for the same
                # resources of the machine.
                dist.barrier()
            times.append(steps.take())
        return times
    finally:
        spread.close()


class _TimedSteps:
    """Optimizer steps of one model on one generated batch.

    Args:
        config: the settings.
        recipe: computes the loss.
        model: the model.
        spread: the strategy that distributes the model.
        device: the rank's device.
        buckets: where gradients are not exchanged, the communication hook adds to it for each of DDP's
            buckets (the moment at which it was ready, its bytes).
        blocks: the parts of the model that are timed.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        model: nn.Module,
        spread: strategy.Strategy,
        device: torch.device,
        buckets: list[tuple[Moment, int]],
        blocks: Sequence[nn.Module],
    ) -> None:
        self._config = config
        self._recipe = recipe
        self._spread = spread
        self._device = device
        self._optimizer = GroupedOptimizer(config, recipe, model).optimizer
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        self._batch = precision.as_inputs(config, recipe.example(config.batch_size), device)
        self._buckets = buckets
        self._blocks = _TimedBlocks(spread.replica, blocks, device, config.compile)

    def take(self) -> dict[str, Any]:
        """Take one step and return the times of its parts."""
        config = self._config
        self._buckets.clear()
        self._blocks.clear()
        forwards, backwards = [], []
        begun = Moment(self._device)
        for micro_batch in range(config.accumulate):
            with self._spread.exchange(micro_batch == config.accumulate - 1):
                before = Moment(self._device)
                # With `checkpoint_activations` blocks are computed once more in the backward pass, which does
                # not count.
                self._blocks.is_forward = True
                with precision.autocast(config, self._device):
                    loss = self._recipe.loss(self._spread.replica, self._batch)["loss"]
                self._blocks.is_forward = False
                straggler.catch_up()
                between = Moment(self._device)
                self._scaler.scale(loss / config.accumulate).backward()
                after = Moment(self._device)
            forwards.append((before, between))
            backwards.append((between, after))
        self._scaler.unscale_(self._optimizer)
        clip(self._spread.replica.parameters(), config)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=not self._spread.keeps_gradients)
        straggler.catch_up()
        ended = Moment(self._device)
        ended.wait()
        return {
            "forward_s": sum(start.seconds_until(end) for start, end in forwards),
            "backward_s": sum(start.seconds_until(end) for start, end in backwards),
            "optimizer_s": after.seconds_until(ended),
            "step_s": begun.seconds_until(ended),
            "last_backward_s": between.seconds_until(after),
            "micro_batches": config.accumulate,
            "blocks": self._blocks.times(config.accumulate),
            "rest_bytes": self._blocks.rest_bytes,
            "buckets": [(between.seconds_until(ready), num_bytes) for ready, num_bytes in self._buckets],
        }


class _TimedBlocks:
    """The forward passes of a model's blocks.

    Args:
        replica: the whole model.
        blocks: parts of it, none inside another.
        device: the rank's device.
        is_compiled: whether torch.compile has compiled the model. Then no block is timed, because hooks would
            cause graph breaks.
    """

    def __init__(
        self, replica: nn.Module, blocks: Sequence[nn.Module], device: torch.device, is_compiled: bool
    ) -> None:
        self._device = device
        self._num_bytes = [_parameter_bytes(block) for block in blocks]
        self.rest_bytes = _parameter_bytes(replica) - sum(self._num_bytes)
        """The bytes of the parameters outside of the blocks."""
        self._passes: list[list[tuple[Moment, Moment]]] = [[] for _ in blocks]
        """For each block the begin and the end of each forward pass of this step."""
        self._begun: list[Moment | None] = [None for _ in blocks]
        self.is_forward = False
        """Whether the model is in its forward pass. A block that is recomputed in the backward pass runs its
        hooks again, which does not count."""
        for index, block in enumerate(() if is_compiled else blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self._begin(index))
            block.register_forward_hook(lambda *_, index=index: self._end(index))

    def _begin(self, index: int) -> None:
        if self.is_forward:
            self._begun[index] = Moment(self._device)

    def _end(self, index: int) -> None:
        begun = self._begun[index]
        if self.is_forward and begun is not None:
            self._passes[index].append((begun, Moment(self._device)))

    def clear(self) -> None:
        """Forget the passes of the last step."""
        for passes in self._passes:
            passes.clear()

    def times(self, micro_batches: int) -> list[tuple[int, float]]:
        """Return for each block (the bytes of its weights, its seconds in one forward pass of the model)."""
        return [
            (num_bytes, sum(begun.seconds_until(ended) for begun, ended in passes) / micro_batches)
            for num_bytes, passes in zip(self._num_bytes, self._passes, strict=True)
        ]


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
