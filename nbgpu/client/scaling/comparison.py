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

_VARIES_ALWAYS = ("load",)
"""Parts of the environment that differ between any two studies and explain no difference between them."""


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
    """The fewer of the two studies' repeats."""

    @property
    def ratio(self) -> float:
        """The step time of the first study divided by that of the other; above 1 the other study is
        faster."""
        return self.step_s / self.other_step_s

    @property
    def is_clear(self) -> bool:
        """Whether the intervals do not overlap; one repeat has none."""
        return self.num_repeats >= LEAST_REPEATS and not self.between[0] <= 1 <= self.between[1]


class ComparedStudy(NamedTuple):
    """What a comparison needs of a study."""

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
            *_differences(first.environment, other.environment, _VARIES_ALWAYS),
        ]
        """Differences between the settings and the environments of the studies, one sentence each. If there
        are none, a ratio is due to the code or to the day."""
        # The text of a value is the key: a value need not be hashable, and True would equal 1.
        theirs = {repr(found.value): found for found in other.summary if isinstance(found, PointSummary)}
        self.points = [
            ComparedPoint(
                found.value,
                found.ranks,
                found.step_s,
                their.step_s,
                # The least ratio is the lower end by the other's upper end, and the largest one the reverse.
                (
                    found.step_between_s[0] / their.step_between_s[1],
                    found.step_between_s[1] / their.step_between_s[0],
                ),
                min(found.num_repeats, their.num_repeats),
            )
            for found in first.summary
            if isinstance(found, PointSummary) and (their := theirs.get(repr(found.value))) is not None
        ]
        if not self.points:
            raise ConfigError(f"{name} and {other_name} have no measured point in common")

    def frame(self) -> pd.DataFrame:
        """One row for each point that both have."""
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
        told = [f"{self.name} against {self.other_name}", *aligned(rows, right=range(6))]
        if self.differences:
            told += ["they do not measure the same:", *(f"  {line}" for line in self.differences)]
        return "\n".join(told)

    __repr__ = __str__
    _repr_html_ = shown_as_html


def _doubt(point: ComparedPoint) -> str:
    return "within the intervals" if point.num_repeats >= LEAST_REPEATS else "one repeat"


def _settings(plan: StudyPlan) -> dict[str, Any]:
    study = plan.config.model_dump(exclude={"studies_dir"})
    cluster = plan.cluster.model_dump()
    return {"recipe": plan.recipe, **study, **cluster, **plan.train}


def _differences(own: Mapping[str, Any], other: Mapping[str, Any], left_out: Sequence[str] = ()) -> list[str]:
    """Return a sentence for each name whose values differ."""
    names = [name for name in dict.fromkeys([*own, *other]) if name not in left_out]
    return [
        f"{name}: {own.get(name)} against {other.get(name)}"
        for name in names
        if own.get(name) != other.get(name)
    ]
