"""A study as tables: for people, and as data frames."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from nbgpu.performance import laws, verdicts
from nbgpu.performance.step_parts import HIDDEN, MOSTLY
from nbgpu.performance.study_results import Gap, Measured, PointSummary, differ_in_size
from nbgpu.planning.studies import RANKS, StudyPlan, StudyPoint
from nbgpu.text.tables import aligned

if TYPE_CHECKING:
    import pandas as pd

PARTS = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    "statistics_s": "BatchNorm's statistics",
    "waiting_s": "waiting for the slowest rank",
    "transfer_s": "exchange, exposed",
    "optimizer_s": "optimizer",
    "other_s": "other",
    "between_s": "validation and checkpoints",
}
"""The parts of a step that add up to it (`performance.step_parts`), in words."""


def heading(plan: StudyPlan) -> str:
    """Return the title of the study: its subject, what it varies, and the kind of scaling."""
    if plan.vary == RANKS:
        what = {
            "strong": "strong scaling: the same samples for each step, shared out over the ranks",
            "weak": "weak scaling: the same batch for each rank",
        }[plan.config.mode]
        return f"{plan.subject}, {what}{_simulated(plan)}"
    return f"{plan.subject}: what {plan.vary} does to the time of a step{_simulated(plan)}"


def _simulated(plan: StudyPlan) -> str:
    return f"; {plan.cluster.simulated}" if plan.cluster.simulated else ""


def law_lines(
    plan: StudyPlan, measured: Sequence[Measured], summary: Sequence[PointSummary | Gap]
) -> list[str]:
    """Return what Amdahl's or Gustafson's law, fitted to the times, gives as the serial fraction of a step.
    Nothing is returned unless one rank and another number of ranks were measured."""
    if plan.vary != RANKS:
        return []
    seconds: dict[int, list[float]] = {}
    for found in measured:
        if found.step_s:
            seconds.setdefault(plan.values[found.point], []).append(median(found.step_s))
    if 1 not in seconds or len(seconds) < 2:
        return []
    # No law allows a speed-up above the number of ranks.
    if any(isinstance(point, PointSummary) and point.is_beyond_ranks for point in summary):
        return [f"no law is fitted: {verdicts.ABOVE_RANKS}"]
    is_weak = plan.config.mode == "weak"
    law = laws.fit_gustafson(seconds) if is_weak else laws.fit_amdahl(seconds)
    if min(map(len, seconds.values())) < verdicts.LEAST_REPEATS:
        fraction = f"{law.serial_fraction.value:.3g}"
        return [f"{law.name}'s law, fitted: {fraction} of a step is serial; {verdicts.ONE_REPEAT}"]
    if is_weak:
        return [f"{law.name}'s law, fitted: {law.serial_fraction} of a step is serial"]
    by_ranks = ", ".join(f"{ranks} ranks {each}" for ranks, each in laws.serial_fractions(seconds).items())
    return [
        f"{law.name}'s law, fitted: {law.serial_fraction} of a step is serial",
        f"serial fraction by Karp and Flatt: {by_ranks}",
    ]


def header_and_rows(
    plan: StudyPlan, summary: Sequence[PointSummary | Gap]
) -> tuple[list[str], list[list[str]]]:
    """The headings of the table, and the cells of each point.

    The number of parameters has a column if it differs between the points.
    """
    with_size = differ_in_size(summary)
    return _header(plan, with_size), [_row(plan, found, with_size) for found in summary]


def _header(plan: StudyPlan, with_size: bool) -> list[str]:
    """Return the headings of the table; its columns depend on what the study varies."""
    columns = [plan.vary]
    if with_size:
        columns.append("parameters")
    if plan.vary != RANKS:
        columns.append("ranks")
    columns += ["samples/step", "a step, ms", "95 % interval", "samples/s"]
    columns += ["speed-up" if plan.vary == RANKS else "relative", "95 % interval"]
    return [*columns, "efficiency"] if plan.vary == RANKS else columns


def _row(plan: StudyPlan, found: PointSummary | Gap, with_size: bool) -> list[str]:
    """Return the cells of one point, in the columns of `_header`. A point without measurements says whether
    it failed."""
    cells = [str(found.value)]
    if with_size:
        cells.append(f"{found.parameters:,}" if isinstance(found, PointSummary) else "")
    if plan.vary != RANKS:
        cells.append(str(found.ranks))
    if isinstance(found, Gap):
        # The list below fills two cells itself, so two fewer are empty.
        empty = len(_header(plan, with_size)) - len(cells) - 2
        return [*cells, "", "failed" if found.why else "not yet", *[""] * empty]
    # Steps of one repeat are alike, and say nothing of how much repeats differ.
    has_interval = found.num_repeats >= verdicts.LEAST_REPEATS
    step_from_s, step_to_s = found.step_between_s
    low, high = found.relative_between
    cells += [
        str(found.samples_per_step),
        f"{1e3 * found.step_s:.2f}",
        f"{1e3 * step_from_s:.2f} to {1e3 * step_to_s:.2f}" if has_interval else "one repeat",
        f"{found.samples_per_s:.2f}",
        f"{found.relative:.2f}",
        f"{low:.2f} to {high:.2f}" if has_interval else "one repeat",
    ]
    if plan.vary == RANKS:
        cells.append(f"{found.efficiency:.0%}")
    return cells


def notes(plan: StudyPlan, summary: Sequence[PointSummary | Gap]) -> list[str]:
    """Return sentences that a reader of the table needs, one for each point with a remark, and for advice
    that was tried."""
    said = [(found.value, remarks(plan, found)) for found in summary]
    remarks_of_points = [f"{plan.vary} = {value}: {text}" for value, text in said if text]
    return [*_kept_promise(plan, summary), *remarks_of_points]


def _kept_promise(plan: StudyPlan, summary: Sequence[PointSummary | Gap]) -> list[str]:
    """Return a sentence that compares the promised gain of the advice with the measured one; none if the
    study tries no advice."""
    if not plan.advice:
        return []
    with_it = summary[-1]
    promised = f"The advice was: {plan.advice} That is {plan.promised:.2f} times the samples per second."
    if isinstance(with_it, Gap) or isinstance(summary[0], Gap):
        return [f"{promised} What it brought was not measured"]
    low, high = with_it.relative_between
    why = verdicts.doubt(with_it)
    between = f" ({low:.2f} to {high:.2f})" if with_it.num_repeats >= verdicts.LEAST_REPEATS else ""
    doubt = f", which is not decided: {why}" if why else ""
    return [f"{promised} It brought {with_it.relative:.2f} times{between}{doubt}"]


def remarks(plan: StudyPlan, found: PointSummary | Gap) -> str:
    """Return what qualifies the numbers of a point: missing or failed repeats, differences between repeats,
    and doubt."""
    if isinstance(found, Gap):
        return f"not measured: {found.why}" if found.why else ""
    said = []
    if found.num_repeats < plan.config.repeats:
        said.append(f"{found.num_repeats} of {plan.config.repeats} repeats")
    if found.is_unsteady:
        said.append(
            f"the repeats differ by {found.unsteadiness - 1:.0%}: something else took part of the machine"
        )
    # Of an advice that was tried, the line above says it.
    if not plan.advice and (why := verdicts.doubt(found)):
        said.append(f"not decided: {why}")
    if found.slowest is not None and found.slowest[1] >= MOSTLY:
        rank, share = found.slowest
        said.append(f"the others waited for rank {rank} in {share:.0%} of the steps")
    if found.why_failed:
        said.append(f"a repeat failed: {found.why_failed}")
    return "; ".join(said)


def verdict(plan: StudyPlan, summary: Sequence[PointSummary | Gap], value: Any) -> str:
    """Return which point is the fastest; or, if `value` is given, how fast the point with this value of the
    varied setting is, compared with the measured point that has the fewest ranks."""
    if value is None:
        return verdicts.fastest(summary, plan.vary)
    return verdicts.point_verdict(summary, value, plan.vary == RANKS)


def lines(plan: StudyPlan, summary: Sequence[PointSummary | Gap], width: int | None = None) -> list[str]:
    """The table as text, and the parts of a step below it; tables that are wider than `width` are turned."""
    header, rows = header_and_rows(plan, summary)
    table = aligned([header, *rows], range(len(header)), width)
    shown = [heading(plan), *table, *notes(plan, summary)]
    measured = [found for found in summary if isinstance(found, PointSummary) and found.parts_s]
    if measured:
        names = [name for name in (*PARTS, HIDDEN) if any(name in found.parts_s for found in measured)]
        titles = [*(PARTS.get(name, "exchange, hidden in backward") for name in names)]
        rows = [[plan.vary, *titles]]
        rows += [[str(found.value), *(_ms(found.parts_s.get(name)) for name in names)] for found in measured]
        shown += ["mean parts of a step, in ms", *aligned(rows, range(len(titles) + 1), width)]
    return shown


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def frame(plan: StudyPlan, summary: Sequence[PointSummary | Gap]) -> pd.DataFrame:
    """One row for each point."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for found in summary:
        cells: dict[str, Any] = {plan.vary: found.value, RANKS: found.ranks}
        if isinstance(found, Gap):
            rows.append({**cells, "repeats": 0, "remarks": remarks(plan, found) or "not measured yet"})
            continue
        if found.parameters:
            cells["parameters"] = found.parameters
        cells |= {
            "samples_per_step": found.samples_per_step,
            "repeats": found.num_repeats,
            "step_s": found.step_s,
            "step_from_s": found.step_between_s[0],
            "step_to_s": found.step_between_s[1],
            "samples_per_s": found.samples_per_s,
            "relative": found.relative,
            "relative_from": found.relative_between[0],
            "relative_to": found.relative_between[1],
            "ideal": found.ideal,
            "efficiency": found.efficiency,
            **found.parts_s,
        }
        if found.slowest is not None:
            cells |= {"slowest_rank": found.slowest[0], "share_of_slowest": found.slowest[1]}
        rows.append({**cells, "remarks": remarks(plan, found)})
    return _whole_parameters(pd.DataFrame(rows))


def _whole_parameters(table: pd.DataFrame) -> pd.DataFrame:
    """The table with whole numbers of parameters, also beside points for which they are not known."""
    return table.astype({"parameters": "Int64"}) if "parameters" in table else table


def repeats(plan: StudyPlan, points: Sequence[StudyPoint], measured: Sequence[Measured]) -> pd.DataFrame:
    """One row for each repeat of each point."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for found in measured:
        point = points[found.point]
        steps = pd.Series(found.step_s, dtype=float)
        rows.append(
            {
                plan.vary: point.value,
                RANKS: point.ranks,
                "repeat": found.repeat,
                **({"parameters": found.parameters} if found.parameters else {}),
                "samples_per_step": point.samples_per_step,
                "steps": len(steps),
                "step_s": steps.median(),
                "least_step_s": steps.min(),
                "samples_per_s": point.samples_per_step / steps.median(),
                **found.parts_s,
                "seconds": found.seconds,
                "why_failed": found.why_failed,
            }
        )
    columns = [plan.vary, RANKS, "repeat", "samples_per_step", "steps", "step_s"]
    return _whole_parameters(pd.DataFrame(rows, columns=None if rows else list(dict.fromkeys(columns))))


def losses(plan: StudyPlan, points: Sequence[StudyPoint], measured: Sequence[Measured]) -> pd.DataFrame:
    """One row for each step of each repeat that was measured."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for found in measured:
        point = points[found.point]
        step_s = pd.Series(found.step_s, dtype=float).median()
        rows += [
            {
                plan.vary: point.value,
                RANKS: point.ranks,
                "repeat": found.repeat,
                "step": step,
                "loss": loss,
                "samples": step * point.samples_per_step,
                # By the median, because the first steps take longer and are no property of the point.
                "seconds": step * step_s,
            }
            for step, loss in found.losses
        ]
    return pd.DataFrame(rows)
