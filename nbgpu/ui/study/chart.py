"""The data of a study's charts: speed-up or samples per second by point, and the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbgpu.client.scaling.study_table import PARTS
from nbgpu.performance.study_results import Gap, PointSummary, differ_in_size
from nbgpu.performance.verdicts import LEAST_REPEATS
from nbgpu.planning.studies import RANKS, StudyPlan
from nbgpu.text.ranks import count_of_ranks

_LARGEST_LINEAR_SPREAD = 20
"""On a linear axis the small ones of values farther apart than this lie on one another."""


class Studied(Protocol):
    """A study of a recipe or of a cell."""

    @property
    def plan(self) -> StudyPlan: ...

    @property
    def folder(self) -> Path | None:
        """The study's folder; None for a study that is not kept."""
        ...

    def describe(self) -> str:
        """One line about the progress."""
        ...

    def summary(self) -> list[PointSummary | Gap]:
        """The points in order."""
        ...


@dataclass(frozen=True)
class StudyChart:
    """The data of a study's charts."""

    title: str
    parts_title: str
    x_title: str
    parts_x_title: str
    """The title of the x axis below the parts of a step."""
    y_title: str
    x: Sequence[Any]
    """The values of the points that were measured: numbers, or their names; the numbers of parameters where
    `is_by_size`."""
    is_by_size: bool
    """Whether the left chart has the number of parameters below it."""
    ticks: Sequence[str]
    """The values of `x` in words where they are on a logarithmic axis; empty where they are not."""
    names: Sequence[str]
    """The values of the points in `x`."""
    y: Sequence[float]
    between: Sequence[tuple[float, float]]
    ideal: Sequence[float]
    """The ideal value of each point; empty if no ideal is known."""
    parts_ms: dict[str, list[float]]
    """The milliseconds of each part of a step, by part, for each point in `x`."""


def chart(study: Studied) -> StudyChart:
    """Return what the charts show at this moment."""
    plan, summary = study.plan, study.summary()
    found = [each for each in summary if isinstance(each, PointSummary)]
    subject = _subject(plan, found)
    is_ranks = plan.vary == RANKS
    are_numbers = all(
        isinstance(each.value, int | float) and not isinstance(each.value, bool) for each in summary
    )
    # Models that are chosen by name are placed by their number of parameters.
    is_by_size = not are_numbers and differ_in_size(summary)
    if is_by_size:
        found.sort(key=lambda each: each.parameters)
        title = f"Samples per second by number of parameters ({plan.vary}), measured: {subject}"
        x: list[Any] = [each.parameters for each in found]
    else:
        by = (
            f"Speed-up by ranks ({plan.config.mode} scaling)"
            if is_ranks
            else f"Samples per second by {plan.vary}"
        )
        title = f"{by}, measured: {subject}"
        x = [each.value if are_numbers else str(each.value) for each in found]
    is_logarithmic = is_by_size or (are_numbers and not is_ranks and _spread(x) > _LARGEST_LINEAR_SPREAD)
    names = [name for name in PARTS if any(name in each.parts_s for each in found)]
    return StudyChart(
        title=title,
        parts_title=f"Parts of a step by {plan.vary}, measured{_over(plan)}",
        x_title="number of parameters" if is_by_size else plan.vary,
        parts_x_title=plan.vary,
        y_title="speed-up" if is_ranks else "samples/s",
        x=x,
        is_by_size=is_by_size,
        ticks=[f"{value:,}" for value in x] if is_logarithmic else [],
        names=[str(each.value) for each in found],
        y=[each.relative if is_ranks else each.samples_per_s for each in found],
        between=[_between(each, is_ranks) for each in found],
        ideal=[each.ideal for each in found] if is_ranks else [],
        parts_ms={name: [1e3 * each.parts_s.get(name, 0.0) for each in found] for name in names},
    )


def _spread(x: Sequence[float]) -> float:
    """Return the ratio of the largest to the least value; 1 if the least is not above 0, where it says
    nothing."""
    return max(x) / min(x) if x and min(x) > 0 else 1.0


def _between(found: PointSummary, is_ranks: bool) -> tuple[float, float]:
    """Return the interval of a point. With a single repeat it is empty, because steps of one repeat say
    nothing of how much repeats differ."""
    if found.num_repeats < LEAST_REPEATS:
        y = found.relative if is_ranks else found.samples_per_s
        return y, y
    return found.relative_between if is_ranks else found.samples_between


def _over(plan: StudyPlan) -> str:
    return f", {plan.cluster.simulated}" if plan.cluster.simulated else ""


def _subject(plan: StudyPlan, found: Sequence[PointSummary]) -> str:
    """Return the recipe and the ranks that were measured, for the titles."""
    of_ranks = "" if plan.vary == RANKS or not found else f", {count_of_ranks(found[0].ranks)}"
    return f"{plan.subject}{of_ranks}{_over(plan)}"
