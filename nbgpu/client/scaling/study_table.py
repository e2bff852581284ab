"""A study as tables: as text, and as data frames."""

from __future__ import annotations

from collections import defaultdict
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
"""The names of the parts of a step, which add up to its time (`performance.step_parts`)."""


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
    """Fit Amdahl's law (strong scaling) or Gustafson's law (weak scaling) to the times of a step. Return
    lines with the serial fraction of a step; none unless 1 rank and another number of ranks were measured."""
    if plan.vary != RANKS:
        return []
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for repeat in measured:
        if repeat.step_s:
            seconds[plan.values[repeat.point]].append(median(repeat.step_s))
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
    fractions = laws.serial_fractions(seconds).items()
    by_ranks = ", ".join(f"{ranks} ranks {fraction}" for ranks, fraction in fractions)
    return [
        f"{law.name}'s law, fitted: {law.serial_fraction} of a step is serial",
        f"serial fraction by Karp and Flatt: {by_ranks}",
    ]


def header_and_rows(
    plan: StudyPlan, summary: Sequence[PointSummary | Gap]
) -> tuple[list[str], list[list[str]]]:
    """Return (the headings of the table, the cells of each point).

    The number of parameters has a column if it differs between the points.
    """
    with_size = differ_in_size(summary)
    return _header(plan, with_size), [_row(plan, point, with_size) for point in summary]


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


def _row(plan: StudyPlan, point: PointSummary | Gap, with_size: bool) -> list[str]:
    """Return the cells of one point, in the columns of `_header`. A point without measurements says whether
    it failed."""
    cells = [str(point.value)]
    if with_size:
        cells.append(f"{point.parameters:,}" if isinstance(point, PointSummary) else "")
    if plan.vary != RANKS:
        cells.append(str(point.ranks))
    if isinstance(point, Gap):
        cells += ["", "failed" if point.why else "not yet"]
        return cells + [""] * (len(_header(plan, with_size)) - len(cells))
    # The spread of the steps of one repeat does not say how much repeats differ.
    has_interval = point.num_repeats >= verdicts.LEAST_REPEATS
    step_from_s, step_to_s = point.step_between_s
    low, high = point.relative_between
    cells += [
        str(point.samples_per_step),
        f"{1e3 * point.step_s:.2f}",
        f"{1e3 * step_from_s:.2f} to {1e3 * step_to_s:.2f}" if has_interval else "one repeat",
        f"{point.samples_per_s:.2f}",
        f"{point.relative:.2f}",
        f"{low:.2f} to {high:.2f}" if has_interval else "one repeat",
    ]
    if plan.vary == RANKS:
        cells.append(f"{point.efficiency:.0%}")
    return cells


def notes(plan: StudyPlan, summary: Sequence[PointSummary | Gap]) -> list[str]:
    """Return the sentences below the table: one about advice that was tried, and one for each point with
    remarks."""
    texts = [(point.value, remarks(plan, point)) for point in summary]
    remarks_of_points = [f"{plan.vary} = {value}: {text}" for value, text in texts if text]
    return [*_advice_outcome(plan, summary), *remarks_of_points]


def _advice_outcome(plan: StudyPlan, summary: Sequence[PointSummary | Gap]) -> list[str]:
    """Return a sentence that compares the predicted gain of the advice with the measured one; none if the
    study tries no advice."""
    if not plan.advice:
        return []
    with_advice = summary[-1]
    promised = f"The advice was: {plan.advice} That is {plan.promised:.2f} times the samples per second."
    if isinstance(with_advice, Gap) or isinstance(summary[0], Gap):
        return [f"{promised} What it brought was not measured"]
    low, high = with_advice.relative_between
    reason = verdicts.doubt(with_advice)
    between = f" ({low:.2f} to {high:.2f})" if with_advice.num_repeats >= verdicts.LEAST_REPEATS else ""
    doubt = f", which is not decided: {reason}" if reason else ""
    return [f"{promised} It brought {with_advice.relative:.2f} times{between}{doubt}"]


def remarks(plan: StudyPlan, point: PointSummary | Gap) -> str:
    """Return what qualifies the numbers of a point: missing or failed repeats, differences between repeats,
    overlapping intervals, and a slow rank."""
    if isinstance(point, Gap):
        return f"not measured: {point.why}" if point.why else ""
    texts = []
    if point.num_repeats < plan.config.repeats:
        texts.append(f"{point.num_repeats} of {plan.config.repeats} repeats")
    if point.is_unsteady:
        texts.append(
            f"the repeats differ by {point.unsteadiness - 1:.0%}: something else took part of the machine"
        )
    # If advice is tried, `_advice_outcome` says this.
    if not plan.advice and (reason := verdicts.doubt(point)):
        texts.append(f"not decided: {reason}")
    if point.slowest is not None and point.slowest[1] >= MOSTLY:
        rank, share = point.slowest
        texts.append(f"the others waited for rank {rank} in {share:.0%} of the steps")
    if point.why_failed:
        texts.append(f"a repeat failed: {point.why_failed}")
    return "; ".join(texts)


def verdict(plan: StudyPlan, summary: Sequence[PointSummary | Gap], value: Any) -> str:
    """Return a line that says which point is the fastest or, if `value` is given, how fast the point with
    this value is compared with the reference."""
    if value is None:
        return verdicts.fastest(summary, plan.vary)
    return verdicts.point_verdict(summary, value, plan.vary == RANKS)


def lines(plan: StudyPlan, summary: Sequence[PointSummary | Gap], width: int | None = None) -> list[str]:
    """Return the study as text: the title, the table, its notes and, if they were measured, a table of the
    mean parts of a step. A table that is wider than `width` characters becomes a block of lines for each row;
    None for no limit."""
    header, rows = header_and_rows(plan, summary)
    table = aligned([header, *rows], range(len(header)), width)
    text = [heading(plan), *table, *notes(plan, summary)]
    measured = [point for point in summary if isinstance(point, PointSummary) and point.parts_s]
    if measured:
        names = [name for name in (*PARTS, HIDDEN) if any(name in point.parts_s for point in measured)]
        rows = [[plan.vary, *(PARTS.get(name, "exchange, hidden in backward") for name in names)]]
        rows += [[str(point.value), *(_ms(point.parts_s.get(name)) for name in names)] for point in measured]
        text += ["mean parts of a step, in ms", *aligned(rows, range(len(rows[0])), width)]
    return text


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def frame(plan: StudyPlan, summary: Sequence[PointSummary | Gap]) -> pd.DataFrame:
    """Return a table with one row for each point; times are in seconds."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for point in summary:
        cells: dict[str, Any] = {plan.vary: point.value, RANKS: point.ranks}
        if isinstance(point, Gap):
            rows.append({**cells, "repeats": 0, "remarks": remarks(plan, point) or "not measured yet"})
            continue
        if point.parameters:
            cells["parameters"] = point.parameters
        cells |= {
            "samples_per_step": point.samples_per_step,
            "repeats": point.num_repeats,
            "step_s": point.step_s,
            "step_from_s": point.step_between_s[0],
            "step_to_s": point.step_between_s[1],
            "samples_per_s": point.samples_per_s,
            "relative": point.relative,
            "relative_from": point.relative_between[0],
            "relative_to": point.relative_between[1],
            "ideal": point.ideal,
            "efficiency": point.efficiency,
            **point.parts_s,
        }
        if point.slowest is not None:
            cells |= {"slowest_rank": point.slowest[0], "share_of_slowest": point.slowest[1]}
        rows.append({**cells, "remarks": remarks(plan, point)})
    return _with_integer_parameters(pd.DataFrame(rows))


def _with_integer_parameters(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with an integer column of parameters, although some points may have no value in it."""
    return table.astype({"parameters": "Int64"}) if "parameters" in table else table


def repeats(plan: StudyPlan, points: Sequence[StudyPoint], measured: Sequence[Measured]) -> pd.DataFrame:
    """Return a table with one row for each repeat of each point; times are in seconds."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for repeat in measured:
        point = points[repeat.point]
        steps = pd.Series(repeat.step_s, dtype=float)
        rows.append(
            {
                plan.vary: point.value,
                RANKS: point.ranks,
                "repeat": repeat.repeat,
                **({"parameters": repeat.parameters} if repeat.parameters else {}),
                "samples_per_step": point.samples_per_step,
                "steps": len(steps),
                "step_s": steps.median(),
                "least_step_s": steps.min(),
                "samples_per_s": point.samples_per_step / steps.median(),
                **repeat.parts_s,
                "seconds": repeat.seconds,
                "why_failed": repeat.why_failed,
            }
        )
    # An empty table has columns, too; the varied setting may be the number of ranks.
    columns = list(dict.fromkeys([plan.vary, RANKS, "repeat", "samples_per_step", "steps", "step_s"]))
    return _with_integer_parameters(pd.DataFrame(rows, columns=None if rows else columns))


def losses(plan: StudyPlan, points: Sequence[StudyPoint], measured: Sequence[Measured]) -> pd.DataFrame:
    """Return a table with one row for each step of each measured repeat: its loss, and the samples and the
    seconds of training up to it."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for repeat in measured:
        point = points[repeat.point]
        step_s = pd.Series(repeat.step_s, dtype=float).median()
        rows += [
            {
                plan.vary: point.value,
                RANKS: point.ranks,
                "repeat": repeat.repeat,
                "step": step,
                "loss": loss,
                "samples": step * point.samples_per_step,
                # By the median step, because the first steps of any run take longer.
                "seconds": step * step_s,
            }
            for step, loss in repeat.losses
        ]
    columns = list(dict.fromkeys([plan.vary, RANKS, "repeat", "step", "loss", "samples", "seconds"]))
    return pd.DataFrame(rows, columns=columns)
