"""The permanent views of a run: the output that stays in the saved notebook, and the report in the run's
folder."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nbgpu.config import TrainConfig
from nbgpu.config.conditions import meaning
from nbgpu.errors import NbgpuError, RunError
from nbgpu.machine.files import write_whole
from nbgpu.package import STATIC
from nbgpu.protocol.records import (
    FINAL_STATES,
    LOW,
    PROFILE_PARTS,
    Device,
    Event,
    RankFailure,
    RankStatus,
    RunInfo,
    RunState,
    ends_an_interval,
)
from nbgpu.run_folder import lines, names
from nbgpu.run_folder.metrics_table import EpochSummary, epochs_of
from nbgpu.run_folder.reader import Reader
from nbgpu.text.durations import duration
from nbgpu.text.ranks import count_of_ranks
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.run import result_view, wording
from nbgpu.ui.run.charts import charts, max_step, pictures, plotly_figure
from nbgpu.ui.run.history import History
from nbgpu.ui.run.html_parts import escape, table


class Reportable(Protocol):
    """The part of a run that reports and panels show. The run may belong to this process, or be read from its
    folder."""

    folder: Path
    config: TrainConfig
    reader: Reader

    @property
    def failures(self) -> Sequence[RankFailure]: ...

    @property
    def error(self) -> NbgpuError | None: ...

    @property
    def info(self) -> RunInfo: ...

    @property
    def status(self) -> RunState: ...

    def statuses(self) -> list[RankStatus]: ...


PLOTLY_GZ = STATIC / "plotly-basic.min.js.gz"
MAX_EPOCHS = 200
"""The most rows in the report's table; epochs.jsonl has all epochs."""


def history_of(run: Reportable) -> History:
    """The history of a run from all of its records so far."""
    history = History()
    for records, _ in run.reader.batches():
        history.add(records)
    return history


def summary(run: Reportable, history: History) -> str:
    """Return one line about the progress of a run, with the losses of its history."""
    return wording.summary(run.info, run.status, run.statuses(), history)


def bundle(run: Reportable, history: History | None = None) -> dict[str, Any]:
    """The MIME bundle that shows a run's curves without a kernel: as Plotly, as pictures and as text. A page
    shows the first of these that it supports.

    Without any records it has only text, as for a run that failed while its packages were imported.
    """
    history = history or history_of(run)
    drawn = charts(history, run.config.why_losses_differ)
    if not drawn:
        return {"text/plain": summary(run, history)}
    return {
        "application/vnd.plotly.v1+json": plotly_figure(run.info, history, drawn),
        "text/html": pictures(run.info, history, drawn),
        "text/plain": summary(run, history),
    }


def write_report(run: Reportable) -> Path:
    """Write `report.html` into the run's folder: one file that opens anywhere, with no network.

    Returns:
        The path of the file.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = run.folder / names.REPORT
    write_whole(path, report_html(run))
    return path


def report_html(run: Reportable) -> str:
    """The page of the report. Sections without content are left out."""
    history = history_of(run)
    info = run.info
    headline = summary(run, history)
    drawn = charts(history, run.config.why_losses_differ)
    last_step = max_step(drawn)
    # A search has no epochs.
    epochs = [] if "epochs" in run.config.UNUSED else epochs_of(run.reader.records(), info)
    pace = wording.pace(history, info.world_size)
    sections = {
        "Result": _result(history.result) if history.result else "",
        "Failures": _failures(run),
        "Curves": f'<div id="charts" role="img" aria-label="{escape(headline)}"></div>' if drawn else "",
        "Pace": f"<p>{escape(pace)}</p>" if pace else "",
        "Epochs": _epochs(epochs) if epochs else "",
        "Where the time went": _profiles(history) if history.profiles else "",
        "Settings": _settings(run),
        "Devices": _devices(info.devices),
        "Versions": _versions(run.folder),
        "Events": _events(history.marks, info) if history.marks else "",
    }
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_s))
    backend = escape(", ".join(filter(None, [info.backend, info.simulated])))
    body = [f"<p>Started {started} on {count_of_ranks(info.world_size)} ({backend}).</p>"]
    if run.status not in FINAL_STATES:
        body.append("<p>No rank has said how it ended: the run goes on, or was killed.</p>")
    body += [f"<p>{escape(sentence)}.</p>" for sentence in run.reader.damage()]
    body += [section(title, content) for title, content in sections.items() if content]
    return page(
        title=f"{info.title} {info.run_id}",
        heading=f"{escape(info.title)} <small>{escape(info.run_id)}</small>",
        headline=headline,
        body="".join(body),
        figures=[plotly_figure(info, history, [chart], last_step) for chart in drawn],
    )


def page(title: str, heading: str, headline: str, body: str, figures: Sequence[Mapping[str, Any]]) -> str:
    """The page of a report, which opens with no network.

    Args:
        title: the title of the page.
        heading: the heading as HTML.
        headline: one line about the progress.
        body: the body as HTML, with an element whose id is `charts`.
        figures: what Plotly draws in that element, side by side where the page is wide.
    """
    # In a string, '</script' would end the script element, and after '<!--<script' the element would not end
    # at all.
    drawn = json.dumps(figures).replace("<", "\\u003c")
    plotly = gzip.decompress(PLOTLY_GZ.read_bytes()).decode().replace("</script", "<\\/script")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{heading}</h1>
<p class="headline">{escape(headline)}</p>
{body}
</main>
<script>{plotly}</script>
<script>
for (const figure of {drawn}) {{
  const place = document.getElementById("charts").appendChild(document.createElement("div"));
  Plotly.newPlot(place, figure.data, figure.layout, figure.config);
}}
</script>
</body>
</html>
"""


_CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; background: light-dark(#fff, #161616); color: light-dark(#222, #ddd); }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { margin: 0; } h1 small { font-weight: normal; font-size: 0.6em; color: #808080; }
h2 { margin: 32px 0 8px; font-size: 1.15em; }
.headline { font-size: 1.1em; font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 16px 4px 0; border-bottom: 1px solid rgba(128,128,128,.3); vertical-align: top; }
td.number { text-align: right; }
pre { overflow-x: auto; padding: 12px; background: rgba(128,128,128,.12); }
figure { display: inline-block; margin: 0 16px 16px 0; } figcaption { color: #808080; }
img { max-width: 100%; image-rendering: pixelated; }
#charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 0 24px; }
#charts > * { min-width: 0; }
section { overflow-x: auto; }
"""


def section(title: str, body: str) -> str:
    """A section of a report, as HTML."""
    return f"<section><h2>{title}</h2>{body}</section>"


def _settings(run: Reportable) -> str:
    model = type(run.config)
    settings = run.config.model_dump()
    rows = [(n, value, meaning(model, n)) for n, value in settings.items() if n not in model.UNUSED]
    return table(("setting", "value", "meaning"), rows)


def _devices(devices: Iterable[Device]) -> str:
    rows = [
        (f"rank {rank}", device.name, device.uuid or "-", f"{device.memory_bytes / 2**30:.1f} GiB")
        for rank, device in enumerate(devices)
    ]
    return table(("rank", "device", "UUID", "memory"), rows)


def _versions(folder: Path) -> str:
    """The table of versions in the run's `env.json`: Python, the host, the git commit and the packages."""
    try:
        environment = lines.load(folder / names.ENVIRONMENT)
        rows = [
            ("Python", environment["python"]),
            ("host", environment["platform"]),
            ("git", environment["git"] or "no repository"),
        ]
        return table(("what", "version"), [*rows, *environment["packages"].items()])
    except FileNotFoundError:
        return "<p>There is no env.json in the run's folder.</p>"
    except (RunError, KeyError, TypeError, AttributeError):
        return "<p>The env.json in the run's folder is not what nbgpu writes.</p>"


def _events(events: Iterable[Event], info: RunInfo) -> str:
    """Return the table of a run's events as HTML, with the time since the start of the run."""
    # The clock of another host may be behind the clock by which the start was recorded.
    rows = [
        (duration(max(e.time_s - info.started_s, 0.0)), e.step, f"rank {e.rank}", e.kind, e.text)
        for e in events
    ]
    return table(("after", "step", "rank", "what", "in words"), rows)


def _epochs(epochs: Sequence[EpochSummary]) -> str:
    """A table with one row for each epoch, or for the last ones of a long run."""
    shown = epochs[-MAX_EPOCHS:]
    means = list(dict.fromkeys(name for epoch in shown for name in epoch.means))
    validation = dict.fromkeys(name for epoch in shown for name in epoch.validation)
    # The ends of an interval stand in the cell of their value.
    validation_values = [name for name in validation if not ends_an_interval(name, validation)]
    rows = [
        [
            f"{epoch.epoch}" if epoch.complete else f"{epoch.epoch} (a part)",
            f"{epoch.first_step} to {epoch.last_step}",
            duration(epoch.train_s),
            epoch.samples_per_s or "",
            *(epoch.means.get(name, "") for name in means),
            *(_validation_value(name, epoch.validation) for name in validation_values),
            f"rank {epoch.slowest_rank}, {epoch.straggler_ratio:.2f} x the fastest",
        ]
        for epoch in shown
    ]
    header = [
        "epoch",
        "steps",
        "took",
        "samples/s",
        *means,
        *(f"val {n}" for n in validation_values),
        "slowest",
    ]
    left_out = f"<p>The last {MAX_EPOCHS} of {len(epochs)}.</p>" if len(epochs) > MAX_EPOCHS else ""
    return left_out + table(header, rows)


def _validation_value(name: str, values: Mapping[str, float]) -> object:
    """The content of a cell: the value, with its interval if it has one."""
    return wording.with_interval(name, values, ".4g") if name + LOW in values else values.get(name, "")


def _profiles(history: History) -> str:
    """A table of the parts of a step, as shares of its time, with one row for each rank that profiled some
    steps. The last part, hidden communication, overlaps with others; the rest add up to the step."""
    rows = []
    for rank, event in sorted(history.profiles.items()):
        step_s = event.detail["step_s"]
        shares = [f"{100 * event.detail[f'{part}_s'] / step_s:.1f} %" for part in PROFILE_PARTS]
        rows.append([f"rank {rank}", duration(step_s), *shares])
    first, last = next(iter(history.profiles.values())).detail["steps"]
    header = ["rank", "a step", *PROFILE_PARTS[:-1], "hidden communication"]
    about = (
        f"<p>Steps {first} to {last}. Communication is the time in which a rank does nothing but wait for others; "
        "what is hidden goes on beside the other parts.</p>"
    )
    return about + table(header, rows)


def _failures(run: Reportable) -> str:
    return "".join(
        f"<p>rank {f.rank}: {escape(f.error_type)}: {escape(f.message)}</p><pre>{to_html(f.traceback)}</pre>"
        for f in run.failures
    )


def _result(event: Event) -> str:
    """The text of the event with a recipe's result, and the result."""
    about = f"<p>{escape(event.text)}</p>" if event.text else ""
    return about + result_view.html(event.detail)
