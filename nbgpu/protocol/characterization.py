"""The messages between `nbgpu characterize` and its worker process, which measures the descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BAD_DATA = 3
"""The process's exit code if files are unusable; the problems are on its stderr."""


@dataclass(frozen=True)
class Measurement:
    """One microstructure to be measured, and where the results go."""

    settings: Mapping[str, Any]
    """The settings of the recipe microstructure, with the file as `data`."""
    stem: str
    """The path of the results without its suffix."""


@dataclass(frozen=True)
class CharacterizationJob:
    """The measurements that one process makes."""

    measurements: Sequence[Measurement]
    only_measured: Sequence[str]
    """Further descriptors, which can be measured but not be the target of a reconstruction."""
    against: Mapping[str, Any] | None
    """The settings of the microstructure or descriptors with which all are compared; None for no
    comparison."""
    only_check: bool
    """Whether to check the files without measuring."""


@dataclass(frozen=True)
class PhaseRow:
    """The numbers of one phase."""

    phase: int
    share: float
    """The share of the pixels that are in the phase."""
    correlation_length_px: float
    """The distance at which the covariance falls to 1/e."""
    is_longer: bool
    """Whether the covariance does not fall so far within limit_to: the length is at least the one given."""
    mean_chord_px: float | None
    """The mean length of a stretch between two borders of the phase, along an axis; None if it has no border,
    or if it was not measured."""


@dataclass(frozen=True)
class Characterized:
    """One microstructure that has been measured."""

    data: str
    shape: tuple[int, ...]
    rows: Sequence[PhaseRow]
    """One for each phase."""
    differences: Mapping[str, float]
    """The mean absolute differences from the structure that it is compared with, by the name of the measure;
    empty if there is none."""
