"""`smoke_test`: two samples per rank, three steps, and a check of everything that can go wrong in a long
run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, cycle, islice

import torch
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.group import exchange
from nbgpu.engine.model.strategy import own_part, shared_out
from nbgpu.engine.workload.recipe import Batch, Loaders
from nbgpu.text.ranks import count_of_ranks

_MAX_NAMES = 5
RESULT_NOTE = (
    "A smoke test's result, of a few samples after three steps: it shows that a result can be computed."
)


def anomalies(config: TrainConfig) -> AbstractContextManager[None]:
    """Return a context in which a smoke test has torch's anomaly detection on: if a backward pass gives NaN,
    the error names the operation and shows the line of the forward pass that called it.

    Use it around training steps only. torch records a Python stack for every differentiable operation;
    computing the result's baseline (a model fitted for comparison) would then take minutes on a slow file
    system.
    """
    if not config.smoke_test:
        return nullcontext()
    # With fp16, the search for the loss scale begins with overflows.
    return torch.autograd.set_detect_anomaly(True, check_nan=config.amp != "fp16")


class SmokeTest:
    """Collects what happened in a smoke test, and reports which checks passed and which failed.

    Args:
        config: the settings, which `smaller` has reduced (nbgpu/planning/suitability.py).
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._batches: list[Batch] = []
        self._before: dict[str, Tensor] = {}
        self.validation: Mapping[str, float] = {}
        """The values of the last validation, by name."""

    def reduced(self, loaders: Loaders) -> Loaders:
        """Return loaders that repeat the batches of the first step in every step, and have only the first
        held-out samples."""
        num_samples = self._config.batch_size
        held_out = [{name: v[:num_samples] for name, v in batch.items()} for batch in islice(loaders.val, 1)]
        train = _Repeated(loaders.train, self._batches, self._config.accumulate)
        return replace(loaders, train=train, val=held_out)

    def begins(self, model: nn.Module) -> None:
        """Record the weights before the first step."""
        self._before = {name: own_part(p.detach()).clone() for name, p in model.named_parameters()}

    def verdict(
        self, model: nn.Module, loaded: Mapping[str, Tensor], state: Mapping[str, Tensor], checkpoint: str
    ) -> tuple[list[str], list[str]]:
        """Return (the checks passed, the checks failed), in words, the same on every rank. A collective.

        Args:
            model: the model after the last step.
            loaded: the tensors read from the checkpoint, whole.
            state: the tensors that it should have held, with fsdp sharded.
            checkpoint: its name.
        """
        findings = [
            self._check_batches(),
            self._check_validation(),
            self._check_movement(model),
            self._check_weights(model),
            _check_checkpoint(loaded, state, checkpoint),
        ]
        return [line for well, line in findings if well], [line for well, line in findings if not well]

    def _check_batches(self) -> tuple[bool, str]:
        """Check that batches are finite, alike on all ranks in shape and dtype, and of `batch_size` samples.
        A collective."""
        described = {
            name: f"{tuple(values.shape)} {str(values.dtype).removeprefix('torch.')}"
            for name, values in self._batches[0].items()
        }
        bad = sorted({name for batch in self._batches for name, v in batch.items() if not v.isfinite().all()})
        by_rank = exchange.gather([described, bad])
        if holders := [
            f"rank {rank}: {', '.join(names)}" for rank, (_, names) in enumerate(by_rank) if names
        ]:
            return False, f"batches hold NaN or Inf ({'; '.join(holders)})"
        if any(shapes != by_rank[0][0] for shapes, _ in by_rank):
            different = "; ".join(f"rank {rank}: {shapes}" for rank, (shapes, _) in enumerate(by_rank))
            return False, f"batches differ between the ranks ({different})"
        size = next(iter(self._batches[0].values())).shape[0]
        if size != self._config.batch_size:
            return False, f"batches have {size} samples, and batch_size is {self._config.batch_size}"
        shapes = ", ".join(f"{name} {what}" for name, what in described.items())
        return True, f"batches are {shapes} on every rank, with no NaN or Inf"

    def _check_validation(self) -> tuple[bool, str]:
        """Check that the values of the last validation are finite; no validation is no failure."""
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.validation.items())
        if not self.validation:
            return True, "there was no validation, because val_every=0 or no sample is held out"
        well = all(map(math.isfinite, self.validation.values()))
        return well, f"validation gives {values}" if well else f"validation gives NaN or Inf: {values}"

    def _check_movement(self, model: nn.Module) -> tuple[bool, str]:
        """Check that the steps moved the parameters. A collective.

        If only some did not move, they are named in a note: some networks have parameters that no loss
        depends on. The guard has ended the run by now if a gradient has NaN or Inf.
        """
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # A parameter has moved if its shard has on any rank: a rank may have no part of a small parameter.
        by_rank = exchange.gather(
            [name for name, p in trained if not torch.equal(own_part(p.detach()), self._before[name])]
        )
        moved = set(chain.from_iterable(by_rank))
        still = [name for name, _ in trained if name not in moved]
        if not still:
            return True, f"each of the {len(trained)} parameters got a gradient without NaN or Inf, and moved"
        if not moved:
            return False, f"no step moved any of the {len(trained)} parameters, with lr={self._config.lr:g}"
        more = f" and {len(still) - _MAX_NAMES} more" if len(still) > _MAX_NAMES else ""
        return (
            True,
            f"NOTE: no step moved {', '.join(still[:_MAX_NAMES])}{more} ({len(still)} of {len(trained)} parameters)",
        )

    def _check_weights(self, model: nn.Module) -> tuple[bool, str]:
        """Check that the parameters are equal on all ranks, bit for bit. A collective, in which the ranks
        compare SHA-256 digests and send no weights."""
        if self._config.strategy == "fsdp":
            return True, "weights are shared out over the ranks: there is nothing to compare"
        by_rank = exchange.gather({name: _fingerprint(p) for name, p in model.named_parameters()})
        if len(by_rank) == 1:
            return True, "one rank: there are no weights to compare"
        different = [name for name in by_rank[0] if len({digests[name] for digests in by_rank}) > 1]
        if different:
            return False, f"weights differ between the ranks, in {', '.join(different[:_MAX_NAMES])}"
        return True, f"weights are the same on all {len(by_rank)} ranks, to the last bit"


def _check_checkpoint(
    loaded: Mapping[str, Tensor], state: Mapping[str, Tensor], checkpoint: str
) -> tuple[bool, str]:
    """Check that each tensor that was read from the checkpoint is equal to the one that was saved. A
    collective.

    Args:
        loaded: the tensors from the checkpoint, whole, by name.
        state: the tensors that were saved, with fsdp this rank's shards.
        checkpoint: the checkpoint's name, for the text.

    Returns:
        Whether all are equal on all ranks, and a text about the result.
    """
    wrong = sorted({*loaded} ^ {*state})
    wrong += [n for n in sorted({*loaded} & {*state}) if not _are_equal(loaded[n], state[n].detach())]
    for rank, names in enumerate(exchange.gather(wrong)):
        if names:
            named = ", ".join(names[:_MAX_NAMES])
            return False, f"{checkpoint} does not give back what was saved, on rank {rank}: {named}"
    return True, f"{checkpoint} was written and read back, to the last bit"


def _are_equal(loaded: Tensor, held: Tensor) -> bool:
    """Compare this rank's shard of `loaded`, a whole tensor, with `held`, which may be sharded."""
    return torch.equal(own_part(shared_out(loaded, held)).cpu(), own_part(held).cpu())


def _fingerprint(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor's bytes; numpy has no bfloat16, so it gets the bytes as uint8."""
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


class _Repeated:
    """Repeats the first batches of a loader endlessly.

    Args:
        source: the loader.
        first: gets the batches; shared by all iterations.
        num_batches: how many batches are repeated.
    """

    def __init__(self, source: Iterable[Batch], first: list[Batch], num_batches: int) -> None:
        self._source = source
        self._first = first
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        if not self._first:
            self._first += islice(self._source, self._num_batches)
        return cycle(self._first)


def in_words(config: TrainConfig, world_size: int, well: Sequence[str]) -> list[str]:
    """Return the lines that report a smoke test that passed."""
    done = f"{config.steps} steps of {config.batch_size * config.accumulate} samples on each of {count_of_ranks(world_size)}"
    return [f"smoke test passed: {done}, strategy={config.strategy!r}, amp={config.amp!r}", *well]
