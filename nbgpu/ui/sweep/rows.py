"""The cells of a sweep's table as text, for a page, a terminal and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbgpu.client.sweeps.trial import Trial
from nbgpu.text.palette import rank_color

if TYPE_CHECKING:
    from nbgpu.client.sweeps.sweep import Sweep


@dataclass(frozen=True)
class TrialRow:
    """The row of one trial in the table."""

    number: int
    color: str
    cells: Sequence[str]
    error: str
    """The error that ended the trial, with its type; empty if it did not fail."""
    is_best: bool


def columns(sweep: Sweep) -> list[str]:
    """The table's header."""
    return ["trial", *sweep.plan.varied, "state", "step", "loss", f"best {sweep.plan.config.sort_by}"]


def rows(sweep: Sweep, trials: Sequence[Trial]) -> list[TrialRow]:
    """The table's rows, in the order of `trials`."""
    best = sweep.best
    return [_row(trial, trial is best) for trial in trials]


def _row(trial: Trial, is_best: bool) -> TrialRow:
    """Return the row of one trial, in the columns of `columns`."""
    step, total, loss, best = trial.step, trial.total_steps, trial.loss, trial.best
    cells = [
        str(trial.number),
        *map(str, trial.settings.values()),
        trial.state,
        f"{step} of {total}" if total else str(step),
        "" if loss is None else f"{loss:.4g}",
        "" if best is None else f"{best[1]:.4g} (step {best[0]})",
    ]
    error = "" if trial.error is None else f"{type(trial.error).__name__}: {trial.error}"
    return TrialRow(trial.number, rank_color(trial.number), cells, error, is_best)
