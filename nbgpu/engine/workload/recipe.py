"""What a recipe is: the protocols by which the trainer knows a workload, and the data that a rank gets of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]

Identity = Mapping[str, Any]
"""Of one set of samples, as JSON: `length`, how many there are; `samples`, a digest of some of them by what they are called,
'' where there is none; `advice`, what to do where the ranks differ."""


@dataclass(frozen=True)
class Loaders:
    """The data of one rank.

    `train` gives one epoch each time that it is iterated: `steps_per_epoch * accumulate` batches, the same
    number on every rank. `val` gives the rank's share of the held-out samples, which may be empty or of
    another length on each rank. `next_epoch` is called after each epoch (caches replace their share there),
    `seek` where training goes on in the middle: the next iteration of `train` begins with the batches of that
    optimizer step, counted from 0, as if all before had been taken. `close` is called at the end, also after a
    failure.
    """

    train: Iterable[Batch]
    val: Iterable[Batch]
    steps_per_epoch: int
    seek: Callable[[int], None]
    next_epoch: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    told: tuple[str, ...] = ()
    """How the data come to the ranks, a sentence each."""
    warnings: tuple[str, ...] = ()
    """Settings that do nothing here, a sentence each."""
    identity: Callable[[], Mapping[str, Identity]] = dict
    """What must be the same on all ranks: the sets of samples that they share out, by what these are called in messages."""


CPU = torch.device("cpu")


class Recipe(Protocol):
    """A workload: its data, its model, its loss. The Trainer does everything else."""

    def __init__(self, config: Any) -> None: ...

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """The rank's data, for its device; DataError names every bad file. No collective may be called in it."""
        ...

    def amount(self) -> tuple[int, int]:
        """(volumes that are trained on, samples that one of them gives in an epoch), with none of them decoded; DataError
        names every file that cannot be used."""
        ...

    def build_model(self) -> nn.Module:
        """The network, on the CPU, in float32. Every rank calls this with the same random state."""
        ...

    def example(self, batch_size: int) -> Batch:
        """A generated batch with the shapes, types and value ranges of the data, on the CPU; made with torch alone."""
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Parts of the model that follow each other: what fsdp gathers, and `checkpoint_activations` computes again,
        one at a time. None of them is inside another."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Scalars of one batch on the device; `loss` is what is minimised, the others are shown."""
        ...

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """One value for each sample of a held-out batch, shape (N,); the Trainer averages over all ranks."""
        ...

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """What to say of the trained model, as JSON, beside honest baselines. Rank 0 calls this at the end."""
        ...


@runtime_checkable
class Inspecting(Protocol):
    """A recipe that can read all its files to their end, before any engine is there."""

    def inspect(self) -> None:
        """DataError with a line for each file that cannot be used."""
        ...


@runtime_checkable
class Adversarial(Protocol):
    """A recipe whose model may also learn to deceive a second network, which learns beside it to tell the model's outputs
    from the data (Goodfellow et al. 2014)."""

    @property
    def discriminator_first_step(self) -> int:
        """The first step that the discriminator takes part in, counted from 0; before it the loss is `loss`."""
        ...

    @property
    def discriminator_lr(self) -> float:
        """Its learning rate, which follows the schedule of the model's."""
        ...

    def build_discriminator(self) -> nn.Module | None:
        """On the CPU, in float32, with no buffers; None where the settings ask for none. Every rank calls this with the same
        random state."""
        ...

    def loss_against(
        self, discriminator: nn.Module, model: nn.Module, batch: Batch
    ) -> tuple[dict[str, Tensor], Any]:
        """As `loss`, with what it is worth to deceive the discriminator; and what that has to learn from, detached."""
        ...

    def discriminator_loss(self, discriminator: nn.Module, seen: Any) -> Tensor:
        """A scalar, the mean over the samples of what `loss_against` gave."""
        ...


@runtime_checkable
class Pictured(Protocol):
    """A recipe that shows what its model makes of held-out samples while the run goes on."""

    def pictures(self, model: nn.Module, batch: Batch) -> dict[str, str]:
        """PNG data URIs by caption, some kilobytes in all, of a held-out batch on the device; no collective."""
        ...


@runtime_checkable
class Judge(Protocol):
    """A recipe whose held-out samples mean something only beside each other, such as who came first."""

    def judge(self, values: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """The values of a validation, from what `validate` gave for all held-out samples of all ranks, by name and each in
        the same order. Every rank calls this with the same, in place of averaging."""
        ...
