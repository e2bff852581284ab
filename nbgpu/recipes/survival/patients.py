"""The training and the held-out patients of a run, and their outcomes and features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nbgpu.config import SurvivalConfig
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.loader import hold_out
from nbgpu.engine.data.volumes import header_problem
from nbgpu.errors import DataError
from nbgpu.recipes.survival.cohort import patient
from nbgpu.recipes.survival.files import PatientRow, read_table
from nbgpu.recipes.survival.metrics import Flags, Floats


@dataclass(frozen=True)
class Patients:
    """The patients of a run. Arrays have one value for each patient, the training patients first."""

    items: tuple[Item, ...]
    """Each item has its `number` in the arrays, its `order` in time (equal times have the same), its `event`
    and its `features`."""
    num_training: int
    times: Floats
    events: Flags
    true_log_hazards: Floats | None
    """Known for generated patients only."""

    @property
    def training(self) -> list[Item]:
        """Return the patients to train on."""
        return list(self.items[: self.num_training])

    @property
    def held_out(self) -> list[Item]:
        """Return the held-out patients."""
        return list(self.items[self.num_training :])


def patients_of(config: SurvivalConfig) -> Patients:
    """Return the patients of a run, the same on every rank.

    Raises:
        DataError: lists every problem of the patients, one per line.
    """
    if config.data == "generated":
        return _generated(config)
    table = read_table(
        Path(config.data).expanduser(),
        config.fold,
        config.features,
        header_problem,
        config.check_time_unit,
    )
    training, held_out = list(table.training), list(table.held_out)
    if not config.fold:
        # All volumes of a patient are on the same side.
        names: list[Item] = [{"name": name} for name in dict.fromkeys(table.patients)]
        apart = {item["name"] for item in hold_out(names, config.val_fraction, config.seed)[1]}
        sides = list(zip(table.patients, table.training, strict=True))
        training = [row for name, row in sides if name not in apart]
        held_out = [row for name, row in sides if name in apart]
    rows = training + held_out
    features = _standardised(rows, len(training), config)
    times = np.array([row.time for row in rows])
    events = np.array([row.event for row in rows])
    sources: list[Item] = [{"name": str(row.image), "image": row.image} for row in rows]
    return _checked(config, sources, features, len(training), times, events)


def _generated(config: SurvivalConfig) -> Patients:
    training, held_out = hold_out(
        [{"name": f"patient {i}", "generated": i} for i in range(config.num_patients)],
        config.val_fraction,
        config.seed,
    )
    sources = training + held_out
    known = np.array(_outcomes(config.seed, config.num_patients))[[item["generated"] for item in sources]]
    none = np.empty((len(sources), 0))
    times, events, log_hazards = known[:, 0], known[:, 1] > 0, known[:, 2]
    return _checked(config, sources, none, len(training), times, events, log_hazards)


@lru_cache(maxsize=4)
def _outcomes(seed: int, num_patients: int) -> list[tuple[float, bool, float]]:
    patients = (patient(seed, index) for index in range(num_patients))
    return [(one.time, one.event, one.log_hazard) for one in patients]


def _standardised(rows: list[PatientRow], num_training: int, config: SurvivalConfig) -> NDArray[np.float64]:
    """Return the features (N, F), standardised to mean 0 and standard deviation 1 over the training patients
    only."""
    values = np.array([row.features for row in rows]).reshape(len(rows), len(config.features))
    if not num_training:
        return values
    mean, deviation = values[:num_training].mean(axis=0), values[:num_training].std(axis=0)
    if same := [name for name, d in zip(config.features, deviation, strict=True) if d == 0]:
        raise DataError(
            "\n".join(
                f"{config.data}: {name} is the same in all rows that are trained on: leave it out"
                for name in same
            )
        )
    return np.asarray((values - mean) / deviation)


def _checked(
    config: SurvivalConfig,
    sources: list[Item],
    features: NDArray[np.float64],
    num_training: int,
    times: Floats,
    events: Flags,
    log_hazards: Floats | None = None,
) -> Patients:
    problems = []
    if num_training < 2:
        problems.append(f"{config.data}: has {num_training} patient(s) to train on; two are needed")
    for part, own in (("trained on", events[:num_training]), ("held out", events[num_training:])):
        if len(own) and not own.any():
            problems.append(
                f"{config.data}: none of the {len(own)} patients that are {part} has the event. Take another seed or "
                "val_fraction, or more patients"
            )
    last = times.max(initial=0.0)
    problems += [
        f"eval_times has {time:g}, and nobody is observed for longer than {last:g}"
        for time in config.eval_times
        if time >= last
    ]
    if problems:
        raise DataError("\n".join(problems))
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
    return Patients(tuple(items), num_training, times, events, log_hazards)
