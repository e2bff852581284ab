"""A run in a terminal: a table of the ranks that is updated, and above it the events of the run.

Where the output is not a terminal (a file, a pipe, a job's log), there is one line every few seconds instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nbgpu.protocol.records import Event, RankStatus
from nbgpu.run_folder import resume
from nbgpu.run_folder.progress import progress
from nbgpu.run_folder.reader import START
from nbgpu.text.console import say, width_of
from nbgpu.text.durations import duration
from nbgpu.text.palette import rank_color
from nbgpu.ui.run import result_view, wording
from nbgpu.ui.run.history import History

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run

_REFRESH_PERIOD_S = 0.25
LINE_PERIOD_S = 10.0
"""The period of the lines where the output is no terminal."""
MAX_ROWS = 16
_BAR_WIDTH = 30
_WIDE = 100
"""The characters of a window that has room for every column."""
_TEXT_COLUMNS = ("rank", "device", "state", "")
_GIB = 2.0**30


def follow(run: Run, console: Console, printed: Sequence[str] = ()) -> None:
    """Show a run until it is over. Ctrl-C stops the run, and a second one leaves at once.

    Args:
        printed: sentences about the data that have been printed already.
    """
    screen = _Screen(run, console, printed)
    if not console.is_terminal:
        _wait(run, screen, lambda: None)
        say(console, screen.summary())
        return
    # Only this thread draws, because rich's own thread would draw while the run's state changes.
    with Live(screen.drawn(), console=console, auto_refresh=False, transient=False) as live:
        _wait(run, screen, lambda: live.update(screen.drawn(), refresh=True))


def _wait(run: Run, screen: _Screen, draw: Any) -> None:
    """Draw the run until it is over. The first Ctrl-C stops the run with a checkpoint, and the second is
    raised."""
    is_stopping = False
    next_line_s = time.monotonic() + LINE_PERIOD_S
    while True:
        try:
            # This is read first, so that the last round shows what was recorded up to the end.
            over = run.over
            screen.tell_news()
            draw()
            if over:
                return
            if not screen.console.is_terminal and time.monotonic() >= next_line_s:
                next_line_s += LINE_PERIOD_S
                say(screen.console, screen.summary())
            time.sleep(_REFRESH_PERIOD_S)
        except KeyboardInterrupt:
            if is_stopping or run.over:
                raise
            is_stopping = True
            run.stop()
            say(screen.console, "stopping after this step, with a checkpoint; Ctrl-C again leaves at once")


class _Screen:
    """The state of a run on the screen, and the part of it that has been printed."""

    def __init__(self, run: Run, console: Console, printed: Sequence[str]) -> None:
        """Note what has been printed already, so that no sentence appears twice."""
        self.console = console
        self._run = run
        self._known_of_data = set(printed)
        self._history = History()
        self._cursor = START
        # These notes were printed when the run was made.
        self._known = set(resume.Beginning.read(run.folder).notes)
        self._result_is_shown = False
        self._hung = False
        self._profiled: set[int] = set()

    def tell_news(self) -> None:
        """Print the events since the last call."""
        for sentence in self._run.info.data:
            if sentence not in self._known_of_data:
                self._known_of_data.add(sentence)
                say(self.console, f"data: {sentence}")
        marks: list[Event] = []
        for records, cursor in self._run.reader.batches(self._cursor):
            self._cursor = cursor
            marks += self._history.add(records)[1]
        # A rank that was cut off may report its failure before the rank that caused it says why.
        for event in sorted(marks, key=lambda mark: mark.text == "failed"):
            if event.text not in self._known:
                say(self.console, _in_words(event), "red" if _is_bad(event) else "")
        for text in self._run.unreported_heals():
            # The records of the ranks say so, too, and also after which step.
            if not self._run.config.telemetry:
                say(self.console, text, "red")
        hangs = bool(self._run.hang)
        if hangs and not self._hung and not self.console.is_terminal:
            say(self.console, self._run.hang)
        self._hung = hangs
        for rank, event in self._history.profiles.items():
            if rank not in self._profiled:
                self._profiled.add(rank)
                say(self.console, f"rank {rank}: {event.text}")
        if self._history.result is not None and not self._result_is_shown:
            self._result_is_shown = True
            say(self.console, f"\n{result_view.text(self._history.result.detail, width_of(self.console))}\n")

    def summary(self) -> str:
        """One line about the progress of the run."""
        return wording.summary(self._run.info, self._run.status, self._run.statuses(), self._history)

    def drawn(self) -> RenderableType:
        """The bar and the table of the ranks."""
        run, info = self._run, self._run.info
        statuses = run.statuses()
        now = progress(info, run.status, statuses)
        head = Table.grid(padding=(0, 2))
        left = f", {duration(now.eta_s)} left" if now.eta_s is not None else ""
        rate = f"{now.samples_per_s:.3g} samples/s" if now.samples_per_s > 0 else ""
        validated = wording.validated(self._history.newest().get(0, {}))
        about = ", ".join(filter(None, [wording.epochs(now), rate, info.simulated, *validated]))
        bar = ProgressBar(total=max(now.total_steps, 1), completed=now.step, width=_BAR_WIDTH)
        head.add_row(Text(run.status, style="bold"), bar, f"{now.in_steps}{left}")
        rows = [_row(status) for status in statuses[:MAX_ROWS]]
        # The learning rate is the same on all ranks, and gives way in a narrow window.
        left_out = {"lr"} if self.console.width < _WIDE else set()
        # An empty column is not drawn: a search has no samples and no learning rate.
        columns = [name for name in rows[0] if name not in left_out and any(row[name] for row in rows)]
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for name in columns:
            justify: Literal["left", "right"] = "left" if name in _TEXT_COLUMNS else "right"
            # The device is the one column that shrinks in a narrow window.
            width = 28 if name == "device" else None
            table.add_column(name, justify=justify, max_width=width, no_wrap=name not in ("device", ""))
        for row in rows:
            table.add_row(*(row[name] for name in columns))
        below = (
            [] if len(statuses) <= MAX_ROWS else [Text(f"and {len(statuses) - MAX_ROWS} more", style="dim")]
        )
        sentence = wording.evaluated(statuses) or wording.pace(self._history, len(statuses))
        pace = [Text(sentence, style="dim")] if sentence else []
        hang = [Text(run.hang, style="bold red")] if run.hang else []
        return Group(head, *([Text(about)] if about else []), table, *below, *pace, *hang)


def _row(status: RankStatus) -> dict[str, str | Text]:
    """The cells of a rank by the names of their columns; a warning stands last, below no name."""
    values = status.values
    use = values.get("utilization_percent")
    memory = wording.memory_bytes(status)
    total = status.device.memory_bytes
    return {
        "rank": Text(f"{status.rank}", style=rank_color(status.rank)),
        "device": Text(status.device.label(), no_wrap=True, overflow="ellipsis"),
        "state": wording.state(status),
        "step": f"{status.step}",
        "loss": _number(values, "loss"),
        "samples/s": _number(values, "samples_per_s", ".1f"),
        "lr": _number(values, "lr", ".3g"),
        "memory": f"{memory / _GIB:.1f}/{total / _GIB:.0f} GiB" if memory is not None and total else "",
        "use": f"{use:.0f} %" if use is not None else "",
        "": Text(wording.warning(status), style="bold red"),
    }


def _number(values: Mapping[str, float], name: str, form: str = ".4g") -> str:
    return f"{values[name]:{form}}" if name in values else ""


def _in_words(event: Event) -> str:
    kind = "" if event.kind in ("note", "state") else f"{event.kind}: "
    return f"step {event.step}: {kind}{event.text}"


def _is_bad(event: Event) -> bool:
    return event.kind in ("failure", "nonfinite") or event.text == "failed"
