"""The training and the held-out patients of a run, and their outcomes and features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Self, get_args

import numpy as np
from numpy.typing import NDArray

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.parts import Part, Parts, split
from nbgpu.engine.data.volumes import header_problem
from nbgpu.errors import DataError
from nbgpu.recipes.survival.cohort import Outcome, outcome
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.files import read_table
from nbgpu.recipes.survival.metrics import Flags, Floats


@dataclass(frozen=True)
class Scale:
    """The means and standard deviations of the features (F,), over the training patients."""

    means: Floats
    deviations: Floats

    @classmethod
    def of_nothing(cls) -> Self:
        """Return the scale of patients without features."""
        return cls(*np.empty((2, 0)))

    def standardised(self, values: Floats) -> Floats:
        """Return features (N, F) as distances from the means in standard deviations."""
        return np.asarray((values - self.means) / self.deviations)


@dataclass(frozen=True)
class Patients:
    """The patients of a run. Arrays have one value for each patient, the training patients first."""

    items: tuple[Item, ...]
    """Each item has the patient's `number`, the index in the arrays; the `order` in time, where equal times
    have the same number; the `event`; and the standardised `features`."""
    num_training: int
    num_validation: int
    times: Floats
    events: Flags
    true_log_hazards: Floats | None
    """None where the data are not generated."""
    scale: Scale
    """The scale with which features were standardised."""

    @property
    def training(self) -> list[Item]:
        """Return the patients to train on."""
        return list(self.items[: self.num_training])

    @property
    def parts(self) -> Parts:
        """Return the patients to train on, those for validation, and those for the test."""
        end = self.num_training + self.num_validation
        return Parts(self.training, list(self.items[self.num_training : end]), list(self.items[end:]))


def load_patients(config: SurvivalConfig) -> Patients:
    """Return the patients of a run, the same on every rank: generated, or read from the CSV file `data` and
    divided by its column `fold` or at random, with features standardised by those of the training patients.

    Raises:
        DataError: the table, the division, the features or the patients have problems. It lists all problems
            of the first of these that has any, one per line.
    """
    if config.data == "generated":
        return _generated(config)
    table_rows = read_table(
        Path(config.data).expanduser(),
        config.fold,
        config.features,
        partial(header_problem, spacing_mm=config.spacing_mm),
        config.check_time_unit,
        config.headings,
    )
    listed: list[Item] = [{"name": str(row.image), "row": row} for row in table_rows]
    if config.fold:
        parts = Parts(
            **{part: [item for item in listed if item["row"].part == part] for part in get_args(Part)}
        )
    else:
        parts = split(listed, config, lambda item: item["row"].patient)
    rows = [item["row"] for item in parts.everything]
    values = np.array([row.features for row in rows]).reshape(len(rows), len(config.features))
    scale = _scale(values[: len(parts.training)], config)
    times = np.array([row.time for row in rows])
    events = np.array([row.event for row in rows])
    # `_build_patients` adds the outcomes and the features to these items.
    sources: list[Item] = [{"name": str(row.image), "image": row.image} for row in rows]
    return _build_patients(config, sources, scale.standardised(values), parts, times, events, scale)


def _generated(config: SurvivalConfig) -> Patients:
    """Return generated patients, divided at random; they have no features, and their true log hazards are
    known."""
    parts = split([{"name": f"patient {i}", "generated": i} for i in range(config.num_patients)], config)
    sources = parts.everything
    outcomes = np.array(_outcomes(config.split_seed, config.num_patients))
    times, events, log_hazards = outcomes[[item["generated"] for item in sources]].T
    features = np.empty((len(sources), 0))
    return _build_patients(
        config, sources, features, parts, times, events > 0, Scale.of_nothing(), log_hazards
    )


@lru_cache(maxsize=4)
def _outcomes(seed: int, num_patients: int) -> list[Outcome]:
    """Return the outcomes of all patients of a generated cohort. The last ones are cached, because drawing
    them takes long."""
    return [outcome(seed, index) for index in range(num_patients)]


def _scale(training: Floats, config: SurvivalConfig) -> Scale:
    """Return the scale with which features are standardised, from those of the training patients (N, F).

    Raises:
        DataError: a feature is the same in all rows.
    """
    if not len(training):
        return Scale(np.zeros(len(config.features)), np.ones(len(config.features)))
    means, deviations = training.mean(axis=0), training.std(axis=0)
    if same := [name for name, d in zip(config.features, deviations, strict=True) if d == 0]:
        raise DataError(
            "\n".join(
                f"{config.data}: {name} is the same in all rows that are trained on: leave it out"
                for name in same
            )
        )
    return Scale(means, deviations)


def _build_patients(
    config: SurvivalConfig,
    sources: list[Item],
    features: NDArray[np.float64],
    parts: Parts,
    times: Floats,
    events: Flags,
    scale: Scale,
    log_hazards: Floats | None = None,
) -> Patients:
    """Check the division, and complete the patients' Items with their numbers, outcomes and features.

    `sources` and all arrays are in the order of `parts.everything`: training, validation, test.

    Args:
        config: the settings.
        sources: an Item for each patient, to which the rest is added.
        features: standardised features (N, F).
        parts: the division.
        times, events: the outcomes (N,).
        scale: the scale with which the features were standardised.
        log_hazards: the true log hazards (N,) of generated patients.

    Raises:
        DataError: too few training patients, a part without an event, or evaluation times beyond the training
            follow-up.
    """
    problems = []
    num_training, num_validation = len(parts.training), len(parts.validation)
    end = num_training + num_validation
    if num_training < 2:
        problems.append(f"{config.data}: has {num_training} patient(s) to train on; two are needed")
    for part, events_of_part in (
        ("trained on", events[:num_training]),
        ("for validation", events[num_training:end]),
        ("for the test", events[end:]),
    ):
        if len(events_of_part) and not events_of_part.any():
            problems.append(
                f"{config.data}: none of the {len(events_of_part)} patients that are {part} has the event. Take another split_seed or "
                "val_fraction, or more patients"
            )
    last = times[:num_training].max(initial=0.0)
    problems += [
        f"eval_times has {time:g}, and no training patient is observed for longer than {last:g}"
        for time in config.eval_times
        if time >= last
    ]
    if problems:
        raise DataError("\n".join(problems))
    # The partial likelihood depends on the order of the times only; equal times get the same number.
    order = np.unique(times, return_inverse=True)[1]
    items: list[Item] = [
        {
            **source,
            "number": number,
            "order": int(order[number]),
            "event": bool(events[number]),
            "features": tuple(features[number].tolist()),
        }
        for number, source in enumerate(sources)
    ]
    return Patients(tuple(items), num_training, num_validation, times, events, log_hazards, scale)
