"""Two studies side by side: their points, and what differs in how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from nbgpu.errors import ConfigError
from nbgpu.performance.study_results import Gap, Interval, PointSummary
from nbgpu.performance.verdicts import LEAST_REPEATS
from nbgpu.planning.studies import StudyPlan
from nbgpu.text.html import shown_as_html
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS_DIFFERENT = ("load",)
"""Parts of the environment that differ between any two studies, and are not listed as a difference."""


@dataclass(frozen=True)
class ComparedPoint:
    """One point of both studies."""

    value: Any
    ranks: int
    step_s: float
    other_step_s: float
    between: Interval
    """The least and the largest ratio that the intervals of both allow."""
    num_repeats: int
    """The number of repeats in the study that has fewer."""

    @property
    def ratio(self) -> float:
        """The first study's step time divided by the other's: above 1 if the other study is faster."""
        return self.step_s / self.other_step_s

    @property
    def is_clear(self) -> bool:
        """Whether the intervals do not overlap; False if a study has one repeat, and so no interval."""
        return self.num_repeats >= LEAST_REPEATS and not self.between[0] <= 1 <= self.between[1]


class ComparedStudy(NamedTuple):
    """The parts of a study that a comparison needs; the study itself imports this module."""

    name: str
    plan: StudyPlan
    environment: Mapping[str, Any]
    summary: Sequence[PointSummary | Gap]


class Comparison:
    """Two studies side by side. Prints as a table.

    Args:
        first: the first study.
        other: the other study.

    Raises:
        ConfigError: the studies have no point in common.
    """

    def __init__(self, first: ComparedStudy, other: ComparedStudy) -> None:
        """Find the points that both studies have measured, and note what else differs between the studies."""
        name, other_name, vary = first.name, other.name, first.plan.vary
        if vary != other.plan.vary:
            raise ConfigError(
                f"{name} varies {vary}, and {other_name} varies {other.plan.vary}: they have no point in common"
            )
        self.name, self.other_name, self._vary = name, other_name, vary
        self.differences: list[str] = [
            *_differences(_settings(first.plan), _settings(other.plan)),
            *_differences(first.environment, other.environment, _ALWAYS_DIFFERENT),
        ]
        """Differences between the settings and the environments of the studies, one sentence each. If there
        are none, a ratio is due to the code or to the day."""
        # Points are matched by the repr of their value, because a value need not be hashable and True == 1.
        others = {repr(point.value): point for point in other.summary if isinstance(point, PointSummary)}
        self.points: list[ComparedPoint] = []
        for point in first.summary:
            same = others.get(repr(point.value))
            if same is None or not isinstance(point, PointSummary):
                continue
            (low_s, high_s), (other_low_s, other_high_s) = point.step_between_s, same.step_between_s
            between = low_s / other_high_s, high_s / other_low_s
            num_repeats = min(point.num_repeats, same.num_repeats)
            self.points.append(
                ComparedPoint(point.value, point.ranks, point.step_s, same.step_s, between, num_repeats)
            )
        if not self.points:
            raise ConfigError(f"{name} and {other_name} have no measured point in common")

    def frame(self) -> pd.DataFrame:
        """Return a table with one row for each point that both studies have; times are in seconds."""
        import pandas as pd

        return pd.DataFrame(
            {
                self._vary: point.value,
                "ranks": point.ranks,
                "step_s": point.step_s,
                "other_step_s": point.other_step_s,
                "ratio": point.ratio,
                "from": point.between[0],
                "to": point.between[1],
                "is_clear": point.is_clear,
            }
            for point in self.points
        )

    def __str__(self) -> str:
        """Return the table with a line for each common point, and below it what else differs between the
        studies."""
        rows = [(self._vary, "a step, ms", "of the other, ms", "ratio", "from", "to", "")]
        rows += [
            (
                str(point.value),
                f"{1e3 * point.step_s:.2f}",
                f"{1e3 * point.other_step_s:.2f}",
                f"{point.ratio:.2f}",
                f"{point.between[0]:.2f}",
                f"{point.between[1]:.2f}",
                "" if point.is_clear else _doubt(point),
            )
            for point in self.points
        ]
        lines = [f"{self.name} against {self.other_name}", *aligned(rows, right=range(6))]
        if self.differences:
            lines += ["they do not measure the same:", *(f"  {line}" for line in self.differences)]
        return "\n".join(lines)

    __repr__ = __str__
    _repr_html_ = shown_as_html


def _doubt(point: ComparedPoint) -> str:
    return "within the intervals" if point.num_repeats >= LEAST_REPEATS else "one repeat"


def _settings(plan: StudyPlan) -> dict[str, Any]:
    study = plan.config.model_dump(exclude={"studies_dir"})
    cluster = plan.cluster.model_dump()
    return {"recipe": plan.recipe, **study, **cluster, **plan.train}


def _differences(
    first: Mapping[str, Any], other: Mapping[str, Any], left_out: Sequence[str] = ()
) -> list[str]:
    """Return a sentence for each name whose values differ."""
    names = [name for name in dict.fromkeys([*first, *other]) if name not in left_out]
    pairs = [(name, first.get(name), other.get(name)) for name in names]
    return [f"{name}: {one} against {two}" for name, one, two in pairs if one != two]
