"""The head of a run, which stays in the notebook: the state, the progress, the best and last values, the
ranks, the error, the result, the events, and links and commands to get back to the run.

The head is HTML without scripts and style sheets, which JupyterLab shows unchanged in a notebook that is not
trusted. So it looks the same after a reload, without a kernel, and in a page made by nbconvert.
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
_MIN_COMMON_SHARE = 0.9
"""The table shows the mean over the ranks if they have at least this share of a series' steps in common."""

LIVE_CLASS = "nbgpu-still-live"
"""The class of the head of a run that goes on. panel.css hides such a head beside a live panel. Once the
kernel is gone there is no panel, and the head shows the last state."""

_FAINT = "opacity:0.75"
_DANGER = "color:#d9453d"
_SCROLLS = "overflow-x:auto"


def bundle(run: Reportable, history: History, handle: str = "") -> dict[str, Any]:
    """The head as an output that a notebook keeps.

    Args:
        run: a run that goes on or is over.
        history: its records so far.
        handle: an expression whose value in this kernel is the run; empty if there is none.
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
    if error := error_line(run):
        parts.append(f'<div style="{_DANGER};font-weight:600;margin:4px 0">{escape(error)}</div>')
    result = "" if history.result is None else result_view.html(history.result.detail)
    tables = (result, _values(run, history), _ranks(run))
    parts += [f'<div style="{_SCROLLS}">{rows}</div>' for rows in tables if rows]
    if pace := wording.pace(history, run.info.world_size):
        parts.append(f"<div>{escape(pace)}</div>")
    if history.marks:
        events = "".join(f"<li>{escape(line)}</li>" for line in wording.recent(history, MAX_EVENTS))
        parts.append(
            f'<details><summary style="cursor:pointer">What happened ({len(history.marks)})</summary>'
            f"<ol>{events}</ol></details>"
        )
    parts.append(_links(run, handle, has_numbers=bool(history.series)))
    live = "" if state in FINAL_STATES else f" {LIVE_CLASS}"
    return f'<div class="nbgpu-still{live}" style="line-height:1.45">{"".join(parts)}</div>'


def text(run: Reportable, history: History) -> str:
    """Return the state, the error, the result and the folder of a run as plain text."""
    parts = [wording.summary(run.info, run.status, run.statuses(), history), error_line(run)]
    if history.result is not None:
        parts.append(result_view.text(history.result.detail))
    return "\n".join(part for part in [*parts, f"folder: {run.folder}"] if part)


def progress(run: Reportable, history: History) -> str:
    """Return a line with the steps and epochs done, the time from the first start of the run to its newest
    numbers, and the throughput."""
    info = run.info
    now = run_progress.progress(info, run.status, run.statuses())
    newest_s = max((series.times_s[-1] for series in history.series.values() if series.times_s), default=0.0)
    parts = [
        now.in_steps,
        wording.epochs(now),
        duration(newest_s - info.started_s) if newest_s > info.started_s else "",
        f"{now.samples_per_s:.3g} samples/s" if now.samples_per_s > 0 else "",
        info.simulated,
    ]
    return " · ".join(filter(None, parts))


def error_line(run: Reportable) -> str:
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
    if losses and len(means) < _MIN_COMMON_SHARE * min(len(series.steps) for series in losses.values()):
        # The series of a long run are thinned, to other steps on each rank, so that few steps have a mean.
        rank, series = next(iter(losses.items()))
        rows.append(_row(f"loss of rank {rank}", list(zip(series.steps, series.values, strict=True))))
    elif means:
        rows.append(_row("loss, the ranks' mean", means))
    # Rank 0 records the validation values, which are those of all ranks together. The two ends of an interval
    # are separate series, which are shown in the row of their value.
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
    """(step, mean) for the steps that all ranks have recorded."""
    at_step = [dict(zip(series.steps, series.values, strict=True)) for series in by_rank.values()]
    first = at_step[0] if at_step else {}
    common = [step for step in first if all(step in values for values in at_step)]
    return [(step, sum(values[step] for values in at_step) / len(at_step)) for step in common]


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


def notebook_folder() -> Path:
    """The folder of the notebook, to which relative links in it are resolved.

    Jupyter names the notebook in the kernel's environment. Where that variable is missing, a kernel starts
    in the notebook's folder.
    """
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))
    return notebook.parent if notebook.is_absolute() and notebook.parent.is_dir() else Path.cwd()


def _links(run: Reportable, handle: str, has_numbers: bool) -> str:
    """Return the links to the run's files, and the code and commands with which a person gets back to the
    run. Links are relative to the notebook's folder, because a Jupyter server resolves them from there."""
    relative = Path(os.path.relpath(run.folder, notebook_folder())).as_posix()
    over = run.status in FINAL_STATES
    shown = [("report", names.REPORT)] if over else []
    shown.append(("settings", names.SETTINGS))
    if has_numbers:  # a run that was stopped before its first step has no such file
        shown.append(("numbers", names.METRICS))
    links = " · ".join(
        f'<a href="{quote(f"{relative}/{file}")}" target="_blank">{label}</a>' for label, file in shown
    )
    folder = escape(run.folder)
    quoted = escape(shlex.quote(str(run.folder)))
    lines = [
        "" if over else f"As it was at {time.strftime('%H:%M:%S')}, when this was saved last.",
        f"{links}. Where these links do not work, as outside of the folder that Jupyter serves: {folder}",
        f"<code>run = {escape(handle)}</code> is its handle in this kernel, until the cluster trains again or stops."
        if handle
        else "",
        f"In a terminal, also when the kernel is gone: <code>nbgpu report {quoted}</code>",
        "To train it elsewhere, by torchrun, Slurm or Kubernetes: "
        f"<code>nbgpu export {quoted} --to slurm</code>",
    ]
    return f'<div style="{_FAINT};margin-top:6px">{"<br>".join(filter(None, lines))}</div>'
