"""The protocols of recipes, by which the trainer uses a workload, and the data of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbgpu.planning.epochs import DataAmount
from nbgpu.run_folder.predictions import Job, Row

Batch = Mapping[str, Tensor]

Identity = Mapping[str, Any]
"""The identity of a set of samples, as JSON: `length`, their number; `samples`, digests of some of them by
name, '' if there is none; `advice`, what to do if the ranks differ."""


Item = Mapping[str, Any]
"""A sample, as the recipe names it: its `name`, and where it is."""


@dataclass(frozen=True)
class Loaders:
    """The data of one rank.

    Each iteration of `train` is one epoch: `steps_per_epoch * accumulate` batches, the same number on every
    rank. `val` has the rank's share of the held-out samples, which may be empty or of another length on each
    rank. `next_epoch` is called after each epoch (caches replace their share in it), and `seek` when training
    continues midway: the next iteration of `train` begins with the batches of that optimizer step, counted
    from 0, as if all earlier batches had been taken. `close` is called at the end, even after a failure.
    """

    train: Iterable[Batch]
    val: Iterable[Batch]
    steps_per_epoch: int
    seek: Callable[[int], None]
    next_epoch: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    summary: tuple[str, ...] = ()
    """How the data reach the ranks, in a sentence each."""
    warnings: tuple[str, ...] = ()
    """Settings that have no effect here, in a sentence each."""
    identity: Callable[[], Mapping[str, Identity]] = dict
    """The identities, which must be equal on all ranks, of the sets of samples that the ranks divide, by
    their names in messages."""
    cached_bytes: Callable[[], int] = int
    """Returns the bytes of the decoded volumes that the rank keeps in host memory."""


CPU = torch.device("cpu")


class Recipe(Protocol):
    """A workload: its data, its model, its loss. The Trainer does everything else."""

    def __init__(self, config: Any) -> None: ...

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the rank's data for its device; DataError names every bad file.

        It must not call a collective.
        """

    def amount(self) -> DataAmount:
        """Return the numbers of volumes and of their samples, without decoding any.

        DataError names every unusable file.
        """

    def build_model(self) -> nn.Module:
        """Return the network, on the CPU, in float32. Every rank calls this with the same random state."""

    def example(self, batch_size: int) -> Batch:
        """Return a generated batch with the shapes, types and value ranges of the data, on the CPU; made with
        torch alone."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return successive parts of the model, which fsdp gathers and `checkpoint_activations` recomputes
        one at a time.

        None of them is inside another.
        """

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return scalars for one batch on the device; `loss` is minimised, the others are shown."""

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return a value for each sample of a held-out batch, shape (N,); the Trainer averages over all
        ranks."""

    def result(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Return results of the trained model as JSON, beside honest baselines.

        Rank 0 calls this at the end.
        """


@runtime_checkable
class Inspecting(Protocol):
    """A recipe that can read all its files completely before any engine starts."""

    def inspect(self) -> None:
        """Raise DataError with a line for each unusable file, if there is one."""


@dataclass(frozen=True)
class ParameterGroup:
    """Some of a model's weights, which learn at a rate of their own."""

    name: str
    """Its name where rates are shown."""
    parameters: Sequence[nn.Parameter]
    lr_factor: float = 1.0
    """The factor of the learning rate of each step."""
    weight_decay: float | None = None
    """The weight decay; None for that of the settings."""


@runtime_checkable
class Grouping(Protocol):
    """A recipe whose model's weights do not all learn at the same rate."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        """Return groups of the model's weights, no weight in two of them. Weights of no group learn at the
        run's rate.

        Args:
            model: the result of `build_model`, on the device, with fsdp sharded.
        """


@runtime_checkable
class Optimizing(Protocol):
    """A recipe that may bring an optimizer and a schedule of its own."""

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer | None:
        """Return an optimizer over exactly these parameter groups of torch; None for that of the settings."""

    def schedule(self, step: int, num_steps: int) -> float | None:
        """Return the factor of the peak learning rate in a step, counted from 0; None for the schedule of the
        settings."""


@runtime_checkable
class Adversarial(Protocol):
    """A recipe whose model may also learn to deceive a discriminator (Goodfellow et al. 2014).

    The discriminator is a second network, trained alongside to distinguish the model's outputs from the data.
    """

    def discriminator_first_step(self, steps_per_epoch: int) -> int:
        """Return the first step in which the discriminator takes part, counted from 0; before it the loss is
        `loss`. An epoch has `steps_per_epoch` optimizer steps."""

    @property
    def discriminator_lr(self) -> float:
        """Return the discriminator's learning rate, which follows the model's schedule."""

    def build_discriminator(self) -> nn.Module | None:
        """Return the discriminator on the CPU, in float32, without buffers; None if the settings ask for
        none.

        Every rank calls this with the same random state.
        """

    def loss_against(
        self, discriminator: nn.Module, model: nn.Module, batch: Batch
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the terms of `loss` with an adversarial term, and the detached input of
        `discriminator_loss`."""

    def discriminator_loss(self, discriminator: nn.Module, seen: Any) -> Tensor:
        """Return a scalar, the mean over the samples of `seen`, which comes from `loss_against`."""


@runtime_checkable
class Pictured(Protocol):
    """A recipe that shows its model's output for held-out samples during the run."""

    def pictures(self, model: nn.Module, batch: Batch) -> dict[str, str]:
        """Return PNG data URIs by caption, some kilobytes in all, for a held-out batch on the device; no
        collective."""


@runtime_checkable
class Evaluated(Protocol):
    """A recipe whose result begins with the model's outputs for many samples. The ranks share these out."""

    def samples_of_result(self) -> Sequence[Any]:
        """Return the samples that the result is about, in order and the same on every rank. They are named
        here, and not read."""

    def evaluate(self, model: nn.Module, device: torch.device, samples: Sequence[Any]) -> list[Any]:
        """Return for each of these samples the values that the result needs, as JSON. It must not call a
        collective."""

    def result(
        self, model: nn.Module, device: torch.device, evaluated: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Return results of the trained model as JSON, beside honest baselines.

        Args:
            model: the trained model.
            device: the model's device.
            evaluated: the results of `evaluate` for all samples, in their order; None to evaluate all of them
                here.
        """


@runtime_checkable
class Judge(Protocol):
    """A recipe whose held-out samples can only be judged together, such as by their order."""

    def judge(self, values: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the values of a validation from the results of `validate` for all held-out samples of all
        ranks.

        They are given by name, all in the same order. Every rank calls this with the same values, in place of
        averaging.
        """


@dataclass(frozen=True)
class Proposal:
    """Values for the settings that are left to the data."""

    values: Mapping[str, Any]
    why: str
    """The reason for the values, in a few words."""


@runtime_checkable
class Proposing(Protocol):
    """A recipe whose settings `FROM_DATA` may be left out."""

    def proposals(self, on_gpu: bool) -> Sequence[Proposal]:
        """Return one or more proposals of values for the settings that are left out. The first one takes the
        most memory.

        Only names and headers of files are read. The proposals are the same on every rank.

        Args:
            on_gpu: whether the ranks have GPUs; steps on the CPU have to be small ones to end in time.

        Raises:
            DataError: no file can be used.
        """


@dataclass(frozen=True)
class Predicted:
    """The prediction for one sample."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The sample's columns in the table, as JSON."""
    files: Sequence[Path] = ()
    """The files that were written."""
    aside: Mapping[str, Any] = field(default_factory=dict)
    """Values that only `Concluding.conclude` gets, and the table does not show, as JSON."""


@runtime_checkable
class Predicting(Protocol):
    """A recipe whose trained model can be applied to data that it was not trained on."""

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return (the new samples, a line for each problem), the same on every rank.

        Each sample has a `name` of its own; only names and headers of files are read.

        Args:
            data: what the predictions are asked for, as the recipe reads it: the path of a file or folder, or
                a word such as 'generated'.

        Raises:
            DataError: there is no sample at all.
        """

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Apply the model to one sample, and write files whose paths begin with `stem`. It must not call a
        collective.

        Raises:
            DataError: the sample's files cannot be used; the other samples are not concerned.
        """


@runtime_checkable
class Concluding(Predicting, Protocol):
    """A recipe that computes further results from all of its predictions together."""

    def reference_samples(self) -> Sequence[Item]:
        """Return the samples of the training data to which the new ones are compared; none if there is no
        need. They are predicted too, and get no row in the table."""

    def conclude(
        self, rows: Sequence[Row], references: Sequence[Row], job: Job
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Return (further columns of the table by the name of the sample, sentences about all samples), and
        write files about all samples into its folder. One rank calls this.

        Args:
            rows: the new samples that did not fail.
            references: the reference samples that did not fail.
            job: the whole job.
        """


def file_stems(names: Sequence[str], suffixes: Sequence[str] = ()) -> list[str]:
    """Return a file name for each sample, without its suffix, from the sample's name. Files of the same name
    in different folders get the differing parts of their paths in front; names that are equal even so get a
    number at their end.

    Args:
        names: the samples' names, which may be paths.
        suffixes: suffixes of files that are left out, such as '.nii.gz'.
    """
    stems = [_stem(Path(name).name, suffixes) for name in names]
    folders = [Path(name).parent.parts for name in names]
    for same in _groups_of_equal(stems):
        # For study/sub-01/anat/T1w and study/sub-02/anat/T1w the differing parts are 'sub-01' and 'sub-02'.
        parts = zip_longest(*(folders[index] for index in same), fillvalue="")
        differing = [level for level in parts if len(set(level)) > 1]
        for index, levels in zip(same, zip(*differing, strict=True), strict=bool(differing)):
            stems[index] = "-".join([*map(_in_file_name, filter(None, levels)), stems[index]])
    while groups := list(_groups_of_equal(stems)):
        # Again, because a number may make a name equal to another one.
        for index in chain.from_iterable(groups):
            stems[index] += f"-{index}"
    return stems


def _in_file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def _stem(name: str, suffixes: Sequence[str]) -> str:
    suffix = next((s for s in sorted(suffixes, key=len, reverse=True) if name.lower().endswith(s)), "")
    return _in_file_name(name[: len(name) - len(suffix)])


def _groups_of_equal(stems: Sequence[str]) -> list[list[int]]:
    """Return the positions of each stem that occurs several times."""
    places: dict[str, list[int]] = {}
    for index, stem in enumerate(stems):
        places.setdefault(stem, []).append(index)
    return [same for same in places.values() if len(same) > 1]
