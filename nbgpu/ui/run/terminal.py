"""A run in a terminal: a table of the ranks that is updated, and above it the events of the run.

If the output is not a terminal (but a file, a pipe or a job's log), a line is printed every few seconds
instead of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

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
"""The period of the lines if the output is no terminal."""
MAX_ROWS = 16
_BAR_WIDTH = 30
_MIN_WIDTH_OF_ALL = 100
"""The least number of characters of a window that has room for every column."""
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


def _wait(run: Run, screen: _Screen, draw: Callable[[], None]) -> None:
    """Draw the run until it is over. The first Ctrl-C stops the run with a checkpoint, and the second is
    raised."""
    is_stopping = False
    next_line_s = time.monotonic() + LINE_PERIOD_S
    while True:
        try:
            # `over` is read before the records, so that the last iteration shows all of them.
            over = run.over
            screen.print_news()
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
        """Make a screen that prints no sentence of `printed` again."""
        self.console = console
        self._run = run
        self._printed_data = set(printed)
        self._history = History()
        self._cursor = START
        # These notes were printed when the run was made.
        self._printed_notes = set(resume.Beginning.read(run.folder).notes)
        self._result_is_printed = False
        self._hung = False
        self._printed_profiles: set[int] = set()

    def print_news(self) -> None:
        """Print what has happened since the last call: data, events, healed ranks, a hang, profiles, and the
        result."""
        for sentence in self._run.info.data:
            if sentence not in self._printed_data:
                self._printed_data.add(sentence)
                say(self.console, f"data: {sentence}")
        marks: list[Event] = []
        for records, cursor in self._run.reader.batches(self._cursor):
            self._cursor = cursor
            marks += self._history.add(records)[1]
        # The cause of a failure is printed before the state 'failed', which another rank may have recorded
        # earlier.
        for event in sorted(marks, key=lambda mark: mark.text == "failed"):
            if event.text not in self._printed_notes:
                say(self.console, _in_words(event), "red" if _is_bad(event) else "")
        for text in self._run.unreported_heals():
            # With telemetry on, the ranks have recorded an event about it, with its step.
            if not self._run.config.telemetry:
                say(self.console, text, "red")
        hangs = bool(self._run.hang)
        if hangs and not self._hung and not self.console.is_terminal:
            say(self.console, self._run.hang)
        self._hung = hangs
        for rank, event in self._history.profiles.items():
            if rank not in self._printed_profiles:
                self._printed_profiles.add(rank)
                say(self.console, f"rank {rank}: {event.text}")
        if self._history.result is not None and not self._result_is_printed:
            self._result_is_printed = True
            say(self.console, f"\n{result_view.text(self._history.result.detail, width_of(self.console))}\n")

    def summary(self) -> str:
        """One line about the progress of the run."""
        return wording.summary(self._run.info, self._run.status, self._run.statuses(), self._history)

    def drawn(self) -> RenderableType:
        """The progress bar, the table of the ranks, and sentences about the run."""
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
        num_more = len(statuses) - MAX_ROWS
        below = [
            (f"and {num_more} more" if num_more > 0 else "", "dim"),
            (wording.evaluated(statuses) or wording.pace(self._history, len(statuses)), "dim"),
            (run.hang, "bold red"),
        ]
        sentences = [Text(text, style=style) for text, style in below if text]
        return Group(head, *([Text(about)] if about else []), self._table(statuses), *sentences)

    def _table(self, statuses: Sequence[RankStatus]) -> Table:
        """The table of the ranks, without columns that are empty: a search has no samples and no learning
        rate."""
        rows = [_row(status) for status in statuses[:MAX_ROWS]]
        # A narrow window has no room for the learning rate, which is the same on all ranks.
        left_out = {"lr"} if self.console.width < _MIN_WIDTH_OF_ALL else set()
        columns = [name for name in rows[0] if name not in left_out and any(row[name] for row in rows)]
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for name in columns:
            justify: Literal["left", "right"] = "left" if name in _TEXT_COLUMNS else "right"
            # In a narrow window the device and the warning, whose column has no title, are wrapped; the other
            # columns keep their width.
            width = 28 if name == "device" else None
            table.add_column(name, justify=justify, max_width=width, no_wrap=name not in ("device", ""))
        for row in rows:
            table.add_row(*(row[name] for name in columns))
        return table


def _row(status: RankStatus) -> dict[str, str | Text]:
    """The cells of a rank by the titles of their columns. The last one is a warning, in a column without a
    title."""
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
