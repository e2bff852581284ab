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
"""Values whose ratio is larger than this get a logarithmic axis: on a linear axis the small values would
overlap."""


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
    """The x of each measured point: the value that the study varies, as a number or a name, or the number of
    parameters if `is_by_size`."""
    is_by_size: bool
    """Whether the x axis of the left chart is the number of parameters."""
    ticks: Sequence[str]
    """The labels of `x` on a logarithmic axis; empty for a linear axis."""
    names: Sequence[str]
    """The value that the study varies at each point, as text."""
    y: Sequence[float]
    between: Sequence[tuple[float, float]]
    """The 95 % interval (low, high) of each point in `y`."""
    ideal: Sequence[float]
    """The ideal value of each point; empty if no ideal is known."""
    parts_ms: dict[str, list[float]]
    """The milliseconds of each part of a step, by part, for each point in `x`."""


def chart(study: Studied) -> StudyChart:
    """Return the present data of the charts."""
    plan, summary = study.plan, study.summary()
    points = [point for point in summary if isinstance(point, PointSummary)]
    is_ranks = plan.vary == RANKS
    are_numbers = all(
        isinstance(point.value, int | float) and not isinstance(point.value, bool) for point in summary
    )
    # Models that are chosen by name are placed by their number of parameters.
    is_by_size = not are_numbers and differ_in_size(summary)
    if is_by_size:
        points.sort(key=lambda point: point.parameters)
        title = f"Samples per second by number of parameters ({plan.vary})"
        x: list[Any] = [point.parameters for point in points]
    else:
        speed_up = f"Speed-up by ranks ({plan.config.mode} scaling)"
        title = speed_up if is_ranks else f"Samples per second by {plan.vary}"
        x = [point.value if are_numbers else str(point.value) for point in points]
    is_logarithmic = is_by_size or (are_numbers and not is_ranks and _spread(x) > _LARGEST_LINEAR_SPREAD)
    parts = [name for name in PARTS if any(name in point.parts_s for point in points)]
    return StudyChart(
        title=f"{title}, measured: {_subject(plan, points)}",
        parts_title=f"Parts of a step by {plan.vary}, measured{_simulated(plan)}",
        x_title="number of parameters" if is_by_size else plan.vary,
        parts_x_title=plan.vary,
        y_title="speed-up" if is_ranks else "samples/s",
        x=x,
        is_by_size=is_by_size,
        ticks=[f"{value:,}" for value in x] if is_logarithmic else [],
        names=[str(point.value) for point in points],
        y=[point.relative if is_ranks else point.samples_per_s for point in points],
        between=[_between(point, is_ranks) for point in points],
        ideal=[point.ideal for point in points] if is_ranks else [],
        parts_ms={name: [1e3 * point.parts_s.get(name, 0.0) for point in points] for name in parts},
    )


def _spread(x: Sequence[float]) -> float:
    """Return the ratio of the largest to the least value; 1 if the least is not above 0, where there is no
    such ratio."""
    return max(x) / min(x) if x and min(x) > 0 else 1.0


def _between(point: PointSummary, is_ranks: bool) -> tuple[float, float]:
    """Return the interval of a point. With too few repeats its ends are the value itself, because the steps
    of one repeat do not show how much repeats differ."""
    if point.num_repeats < LEAST_REPEATS:
        y = point.relative if is_ranks else point.samples_per_s
        return y, y
    return point.relative_between if is_ranks else point.samples_between


def _simulated(plan: StudyPlan) -> str:
    return f", {plan.cluster.simulated}" if plan.cluster.simulated else ""


def _subject(plan: StudyPlan, points: Sequence[PointSummary]) -> str:
    """Return the recipe, the number of ranks and a simulated link, for the titles."""
    ranks = "" if plan.vary == RANKS or not points else f", {count_of_ranks(points[0].ranks)}"
    return f"{plan.subject}{ranks}{_simulated(plan)}"
