"""Risks of new patients from their scores: their percentile among the training patients, and probabilities of
survival."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.volumes import header_problem
from nbgpu.recipes.survival import cohort, metrics
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.files import read_new
from nbgpu.recipes.survival.metrics import Flags, Floats, Steps
from nbgpu.recipes.survival.patients import Scale
from nbgpu.run_folder.predictions import Row

_NUM_GENERATED = 16


def new_patients(config: SurvivalConfig, scale: Scale, data: str) -> tuple[list[Item], list[str]]:
    """Return the patients of a table, with features in the scale of the training patients, and a line for
    each bad row."""
    if data == "generated":
        return _generated(config.num_patients, config.split_seed), []
    rows, problems = read_new(
        Path(data).expanduser(),
        config.features,
        partial(header_problem, spacing_mm=config.spacing_mm),
        config.headings,
    )
    values = np.array([row.features for row in rows]).reshape(len(rows), len(config.features))
    standardised = scale.standardised(values)
    return [
        {
            "name": str(row.image),
            "image": row.image,
            "features": tuple(features.tolist()),
            **_outcome(row.time, row.event),
        }
        for row, features in zip(rows, standardised, strict=True)
    ], problems


def _generated(num_known: int, seed: int) -> list[Item]:
    """Return generated patients that a run with `num_known` generated patients has not seen."""
    items: list[Item] = []
    for number in range(num_known, num_known + _NUM_GENERATED):
        time, event, _ = cohort.outcome(seed, number)
        item = {"name": f"patient {number}", "generated": number, "features": ()}
        items.append({**item, **_outcome(float(time), bool(event))})
    return items


def _outcome(time: float | None, event: bool | None) -> dict[str, Any]:
    """Return the fields of a new patient's Item that `Prepare` needs, where `number` and `order` are
    placeholders, and the `outcome` (time, event); None if it is not known."""
    return {
        "number": -1,
        "order": 0,
        "event": bool(event),
        "outcome": None if time is None else (time, event),
    }


def risks(
    rows: Sequence[Row],
    scores: Floats,
    times: Floats,
    events: Flags,
    when: Floats,
    num_groups: int,
) -> dict[str, dict[str, Any]]:
    """Return for each new patient, by name, the columns of the table.

    `risk_percentile` is the share of the training patients with a lower score, in percent; `risk_group`
    counts from 1, the lowest, and divides the training patients evenly; `survival_T` is the probability of no
    event until the time T; `median_time` is the time at which this probability is one half, and empty where
    the training patients were not observed for so long.

    Args:
        rows: the new patients, each with its `log_hazard`.
        scores, times, events: those of the training patients, (N,) each.
        when: the times T in the unit of the data, (T,).
        num_groups: the number of risk groups.
    """
    thresholds = np.quantile(scores, np.arange(1, num_groups) / num_groups)
    new_scores = np.array([row.values["log_hazard"] for row in rows])
    # Subtracting a constant changes no probability, and keeps the exponentials small.
    constant = scores.mean()
    baseline = metrics.baseline_hazard(scores - constant, times, events)
    probabilities = metrics.survival(new_scores - constant, baseline, when)
    medians = _medians(new_scores - constant, baseline)
    percentiles = np.searchsorted(np.sort(scores), new_scores) / len(scores) * 100
    groups = metrics.risk_groups(new_scores, thresholds) + 1
    return {
        row.name: {
            "risk_percentile": round(float(percentiles[index]), 1),
            "risk_group": int(groups[index]),
            **{
                f"survival_{time:.4g}": round(float(p), 4)
                for time, p in zip(when, probabilities[index], strict=True)
            },
            "median_time": medians[index],
        }
        for index, row in enumerate(rows)
    }


def _medians(scores: Floats, baseline: Steps) -> list[float | None]:
    """Return for each patient the first time at which the probability of no event is at most one half; None
    if it stays above up to the last time of the baseline hazard."""
    # exp(-exp(score) * H0(t)) is one half where the cumulative baseline hazard H0 is log(2) / exp(score).
    first = np.searchsorted(baseline.values, np.log(2) / np.exp(scores))
    return [float(f"{baseline.times[index]:.6g}") if index < len(baseline.times) else None for index in first]


def concordance_in_words(rows: Sequence[Row]) -> list[str]:
    """Return one sentence with the C-index of the new patients with known outcomes; an empty list if no two
    of them can be compared."""
    observed = [row for row in rows if row.aside.get("outcome")]
    scores = np.array([row.values["log_hazard"] for row in observed])
    times = np.array([row.aside["outcome"][0] for row in observed], np.float64)
    events = np.array([row.aside["outcome"][1] for row in observed], bool)
    c_index = metrics.c_index(scores, times, events)
    if np.isnan(c_index):
        return []
    return [
        f"Of {len(observed)} patients with known outcomes, {events.sum()} of them with the event, the C-index is {c_index:.3f}"
    ]
