"""The protocols of recipes whose trained models can be applied to new data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nbgpu.run_folder.predictions import Job, Row

Item = Mapping[str, Any]
"""A sample, as the recipe names it: its `name`, and where it is."""


@dataclass(frozen=True)
class Predicted:
    """What was predicted for one sample."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The sample's columns in the table, as JSON."""
    files: Sequence[Path] = ()
    """The files that were written."""
    aside: Mapping[str, Any] = field(default_factory=dict)
    """What `Concluding.conclude` needs to know and the table does not show, as JSON."""


@runtime_checkable
class Predicting(Protocol):
    """A recipe whose trained model can be applied to data that it was not trained on."""

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return (the new samples, a line for each problem), the same on every rank.

        Each sample has a `name` of its own; only names and headers of files are read.

        Raises:
            DataError: there is no sample at all.
        """
        ...

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Apply the model to one sample, and write files whose paths begin with `stem`. It must not call a
        collective.

        Raises:
            DataError: the sample's files cannot be used; the other samples are not concerned.
        """
        ...


@runtime_checkable
class Concluding(Predicting, Protocol):
    """A recipe that can say more of its predictions once all of them are there."""

    def reference_samples(self) -> Sequence[Item]:
        """Return the samples of the training data to which the new ones are compared; none if there is no
        need. They are predicted too, and get no row in the table."""
        ...

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
        ...


def file_stems(names: Sequence[str], suffixes: Sequence[str] = ()) -> list[str]:
    """Return a file name for each sample, without ending, from its own name. Files of the same name get those
    of their folders that differ in front, and names that are the same even so a number behind.

    Args:
        names: the samples' names, which may be paths.
        suffixes: endings of files that are left out.
    """
    stems = [_stem(Path(name).name, suffixes) for name in names]
    folders = [Path(name).parent.parts for name in names]
    for same in _groups_of_equal(stems):
        # Beside 'T1w' are 'sub-01' and 'sub-02' of study/sub-01/anat and study/sub-02/anat.
        parts = zip_longest(*(folders[index] for index in same), fillvalue="")
        differing = [level for level in parts if len(set(level)) > 1]
        for index, levels in zip(same, zip(*differing, strict=True), strict=bool(differing)):
            stems[index] = "-".join([*map(_in_file_name, filter(None, levels)), stems[index]])
    for same in _groups_of_equal(stems):
        for index in same:
            stems[index] += f"-{index}"
    return stems


def _in_file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def _stem(name: str, suffixes: Sequence[str]) -> str:
    suffix = next((s for s in sorted(suffixes, key=len, reverse=True) if name.lower().endswith(s)), "")
    return _in_file_name(name[: len(name) - len(suffix)])


def _groups_of_equal(stems: Sequence[str]) -> list[list[int]]:
    """The places of each stem that occurs several times."""
    places: dict[str, list[int]] = {}
    for index, stem in enumerate(stems):
        places.setdefault(stem, []).append(index)
    return [same for same in places.values() if len(same) > 1]
