"""The head of a run as it stays in the notebook: its state, how far it came, its best and last values, its
ranks, why it failed, its result, what happened, and the way back to it.

It is HTML that JupyterLab shows as it is in a notebook that nobody has trusted, with no script and no style
sheet, so that it reads the same after a reload, without a kernel, and in a page made by nbconvert.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nbgpu.protocol.records import FINAL_STATES, LOW, ends_an_interval
from nbgpu.run_folder import names
from nbgpu.run_folder import progress as run_progress
from nbgpu.text.durations import duration
from nbgpu.text.palette import rank_color
from nbgpu.ui.run import result_view, wording
from nbgpu.ui.run.history import History, Series
from nbgpu.ui.run.html_parts import escape, table

if TYPE_CHECKING:
    from nbgpu.ui.run.snapshot import Reportable

MAX_RANKS = 32
MAX_EVENTS = 200
_GIB = 2.0**30
_LEAST_SHARE_IN_COMMON = 0.9
"""The share of a rank's steps from which on the mean over the ranks stands for all of them."""

LIVE_CLASS = "nbgpu-still-live"
"""The class of a head that is updated during the run. panel.css hides such a head beside a live panel. Once
the kernel is gone there is no panel, and the head shows the last state."""

_FAINT = "opacity:0.75"
_DANGER = "color:#d9453d"
_SCROLLS = "overflow-x:auto"


def bundle(run: Reportable, history: History, handle: str = "") -> dict[str, Any]:
    """The head as an output that a notebook keeps.

    Args:
        run: a run that goes on or is over.
        history: its records so far.
        handle: an expression that is the run's handle in this kernel; empty where there is none.
    """
    return {"text/html": html(run, history, handle), "text/plain": text(run, history)}


def html(run: Reportable, history: History, handle: str = "") -> str:
    """Return the head as HTML: title and state, progress, error, result, values, ranks, events, and the links
    back to the run."""
    info, state = run.info, run.status
    statuses = run.statuses()
    now = run_progress.progress(info, state, statuses)
    badge = (
        f"border:1px solid #8884;border-radius:10px;padding:1px 9px;{_DANGER if state == 'failed' else ''}"
    )
    title = (
        f'<strong style="font-size:115%">{escape(info.title)}</strong> '
        f'<span style="{_FAINT}">{escape(info.run_id)}</span> <span style="{badge}">{escape(state)}</span>'
    )
    share = min(1.0, now.step / info.total_steps) if info.total_steps else 0.0
    bar = (
        '<div style="background-color:#8884;border-radius:3px;height:6px;margin:6px 0 4px">'
        f'<div style="background-color:#1976d2;border-radius:3px;height:6px;width:{100 * share:.1f}%"></div></div>'
    )
    parts = [f"<div>{title}</div>", bar, f"<div>{escape(progress(run, history))}</div>"]
    if why := why_failed(run):
        parts.append(f'<div style="{_DANGER};font-weight:600;margin:4px 0">{escape(why)}</div>')
    if history.result is not None:
        parts.append(f'<div style="{_SCROLLS}">{result_view.html(history.result.detail)}</div>')
    parts += [
        f'<div style="{_SCROLLS}">{rows}</div>' for rows in (_values(run, history), _ranks(run)) if rows
    ]
    if pace := wording.pace(history, run.info.world_size):
        parts.append(f"<div>{escape(pace)}</div>")
    if history.marks:
        events = "".join(f"<li>{escape(line)}</li>" for line in wording.recent(history, MAX_EVENTS))
        parts.append(
            f'<details><summary style="cursor:pointer">What happened ({len(history.marks)})</summary>'
            f"<ol>{events}</ol></details>"
        )
    parts.append(_way_back(run, handle, has_numbers=bool(history.series)))
    live = state not in FINAL_STATES
    return f'<div class="nbgpu-still{f" {LIVE_CLASS}" if live else ""}" style="line-height:1.45">{"".join(parts)}</div>'


def text(run: Reportable, history: History) -> str:
    """Return the state, the error, the result and the folder of a run as plain text."""
    parts = [wording.summary(run.info, run.status, run.statuses(), history), why_failed(run)]
    if history.result is not None:
        parts.append(result_view.text(history.result.detail))
    return "\n".join(part for part in [*parts, f"folder: {run.folder}"] if part)


def progress(run: Reportable, history: History) -> str:
    """Return a line with the steps and epochs done, the time from the run's first start to its newest
    numbers, and the throughput."""
    info, statuses = run.info, run.statuses()
    now = run_progress.progress(info, run.status, statuses)
    words = [now.in_steps, wording.epochs(now)]
    newest_s = max((series.times_s[-1] for series in history.series.values() if series.times_s), default=0.0)
    if newest_s > info.started_s:
        words.append(duration(newest_s - info.started_s))
    if now.samples_per_s > 0:
        words.append(f"{now.samples_per_s:.3g} samples/s")
    return " · ".join(filter(None, [*words, info.simulated]))


def why_failed(run: Reportable) -> str:
    """The first sentence of the error that ended a run; empty if the run did not fail."""
    if run.failures:
        first = run.failures[0]
        return f"rank {first.rank}: {first.error_type}: {_first_sentence(first.message)}"
    return "" if run.error is None else f"{type(run.error).__name__}: {_first_sentence(str(run.error))}"


def _first_sentence(message: str) -> str:
    return re.split(r"(?<=[.!?])\s|\n", message.strip(), maxsplit=1)[0]


def _values(run: Reportable, history: History) -> str:
    """A table of the last, lowest and highest loss and validation values."""
    rows: list[list[object]] = []
    losses = history.ranks_of("loss")
    means = _mean_over_ranks(losses)
    if losses and len(means) < _LEAST_SHARE_IN_COMMON * min(len(series.steps) for series in losses.values()):
        # Of a long run each rank's series keeps its own extremes, and few of the steps of the others.
        rank, series = next(iter(losses.items()))
        rows.append(_row(f"loss of rank {rank}", list(zip(series.steps, series.values, strict=True))))
    elif means:
        rows.append(_row("loss, the ranks' mean", means))
    # Validation values are of all ranks together, and rank 0 alone records them. The two ends of an interval
    # are series of their own, which are shown in the row of their value.
    names = {name for _, name in history.series if name.startswith("val_")}
    newest = history.newest().get(0, {})
    for name in sorted(name for name in names if not ends_an_interval(name, names)):
        series = history.series[0, name]
        label = f"validation: {wording.readable(name)}"
        if name == f"val_{run.config.best_metric}":
            label += f" ({run.config.best_mode} is kept as the best)"
        row = _row(label, list(zip(series.steps, series.values, strict=True)))
        if name + LOW in names:
            row[1] = f"{wording.with_interval(name, newest, '.4g')} (step {series.steps[-1]})"
        rows.append(row)
    return table(["", "last", "lowest", "highest"], rows) if rows else ""


def _mean_over_ranks(by_rank: Mapping[int, Series]) -> list[tuple[int, float]]:
    """(step, mean) of the steps that the series of all ranks have."""
    values = [dict(zip(series.steps, series.values, strict=True)) for series in by_rank.values()]
    if not values:
        return []
    shared = [step for step in values[0] if all(step in own for own in values)]
    return [(step, sum(own[step] for own in values) / len(values)) for step in shared]


def _row(label: str, points: Sequence[tuple[int, float]]) -> list[object]:
    """The last, the lowest and the highest of some values, each with its step."""
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    low, high = (_format_at_step(*min(finite)), _format_at_step(*max(finite))) if finite else ("", "")
    step, value = points[-1]
    return [label, _format_at_step(value, step), low, high]


def _format_at_step(value: float, step: int) -> str:
    return f"{value:.4g} (step {step})"


def _ranks(run: Reportable) -> str:
    """Return a table with the device, state, step, loss and memory of each rank."""
    statuses = run.statuses()
    rows = []
    for status in statuses[:MAX_RANKS]:
        used = wording.memory_bytes(status)
        memory = "" if used is None else f"{used / _GIB:.2f} of {status.device.memory_bytes / _GIB:.0f} GiB"
        loss = status.values.get("loss")
        chip = f'<span style="color:{rank_color(status.rank)}">■</span> rank {status.rank}'
        cells = [
            status.device.label(),
            wording.state(status),
            status.step,
            "" if loss is None else f"{loss:.4g}",
        ]
        rows.append(
            f"<tr><th>{chip}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in [*cells, memory])}</tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "device", "state", "step", "loss", "memory"))
    more = f"<p>and {len(statuses) - MAX_RANKS} more ranks</p>" if len(statuses) > MAX_RANKS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"


# ---- the way back ----


def notebook_folder() -> Path:
    """The folder of the notebook, from which its relative links go.

    Jupyter names the notebook in the kernel's environment; elsewhere a kernel starts in its folder.
    """
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))
    return notebook.parent if notebook.is_absolute() and notebook.parent.is_dir() else Path.cwd()


def _way_back(run: Reportable, handle: str, has_numbers: bool) -> str:
    """Return the links to the run's files, and the code and commands with which a person gets back to the
    run. Links are relative to the notebook's folder, because a Jupyter server resolves them from there."""
    here = Path(os.path.relpath(run.folder, notebook_folder())).as_posix()
    over = run.status in FINAL_STATES
    shown = [("report", names.REPORT)] if over else []
    shown.append(("settings", names.SETTINGS))
    if has_numbers:  # a run that was stopped before its first step has no such file
        shown.append(("numbers", names.METRICS))
    links = " · ".join(
        f'<a href="{quote(f"{here}/{file}")}" target="_blank">{label}</a>' for label, file in shown
    )
    folder = escape(run.folder)
    lines = [
        f"{links}. Where these links do not work, as outside of the folder that Jupyter serves: {folder}"
    ]
    if handle:
        lines.append(
            f"<code>run = {escape(handle)}</code> is its handle in this kernel, until the cluster trains again or stops."
        )
    lines.append(
        f"In a terminal, also when the kernel is gone: <code>nbgpu report {escape(shlex.quote(str(run.folder)))}</code>"
    )
    lines.append(
        "To train it elsewhere, by torchrun, Slurm or Kubernetes: "
        f"<code>nbgpu export {escape(shlex.quote(str(run.folder)))} --to slurm</code>"
    )
    if not over:
        saved = time.strftime("%H:%M:%S")
        lines.insert(0, f"As it was at {saved}, when this was saved last.")
    return f'<div style="{_FAINT};margin-top:6px">{"<br>".join(lines)}</div>'
