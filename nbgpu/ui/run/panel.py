"""The kernel's side of the live panel of a run: update the page five times a second, and at the end replace
the panel by a picture, which stays in the notebook.

The page and the kernel exchange these custom messages of one widget:

    page -> kernel   {type: 'ready', plotly: bool}     a page has loaded the panel, with or without Plotly
                     {type: 'command', command}        'pause', 'resume' or 'stop'
                     {type: 'bundle'}                  the last outputs did not reach my notebook: send them
                     {type: 'stored'}                  the notebook has the outputs: the widget can go
    kernel -> page   {type: 'snapshot', ...} + points  the whole run; sent again to every page that is ready
                     {type: 'delta', ...} + points     what is new
                     {type: 'plotly'} + one buffer     the Plotly bundle, compressed by gzip
                     {type: 'refused', text}           why a command could not be carried out
                     {type: 'end'}                     the run is over: ask for the bundle if it did not come
                     {type: 'bundle', outputs}         a list of {slot, data, metadata}

The buffers of points are described in `comm_protocol.py`. A *mark* is an event of the run that the charts
show. Nothing here ever waits for a page's answer.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import anywidget
import traitlets
from IPython.display import display, update_display

from nbgpu.client.cluster import cluster as clusters
from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend, has_subshells
from nbgpu.errors import NbgpuError, NoClusterError
from nbgpu.package import STATIC
from nbgpu.protocol.records import FINAL_STATES, Event
from nbgpu.run_folder.progress import progress
from nbgpu.run_folder.reader import START
from nbgpu.text.durations import duration
from nbgpu.text.palette import rank_color
from nbgpu.ui.followed import follow
from nbgpu.ui.run import head_view, wording
from nbgpu.ui.run.comm_protocol import SeriesIds, encode
from nbgpu.ui.run.history import CAPACITY, History, Series, SeriesKey
from nbgpu.ui.run.snapshot import PLOTLY_GZ, bundle, history_of, summary
from nbgpu.ui.run.system_charts import LINES
from nbgpu.ui.slot import display_in, head_of, new_slot, open_head, require_notebook, slot_metadata

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run

TICK_S = 0.2
"""The period of messages to the page."""
STATUS_PERIOD_S = 0.6
"""The period in which steps, memory and warnings are sent. A change of state is sent with the next tick."""

SUMMARY_PERIOD_S = 3.0
"""The period in which the text is updated if no page shows widgets."""
PICTURE_PERIOD_S = 20.0
"""The period in which the picture of the curves is replaced if no page shows widgets."""
HEAD_PERIOD_S = 10.0
"""The period in which the head of the run is written into the notebook, where it stays if the kernel dies."""
MIN_POINTS_OF_NEWS = 4
"""The number of points of each series that a message of new points may always have."""

MAX_POINTS_IN_MESSAGE = 200_000
"""The most points of all series in one message. They take about 4 MB."""
MIN_POINTS_OF_WHOLE = 500
"""The fewest points of each series that represent a whole run, however many ranks it has."""

Feed = Callable[[dict[SeriesKey, Series], list[Event], bool], None]


_LOST: Mapping[str, Any] = {
    "state": "lost",
    "step": None,
    "memory_bytes": None,
    "warning": "its host is lost",
}
"""The status of a rank that a run has lost with its host."""


class Follower:
    """Reads the new records of a run periodically, until the run is over, and passes them on.

    Args:
        run: the run to follow.
        period_s: the time between two calls.
        feed: called on a thread, while `lock` is held, with the new points, the new marks, and whether these
            are the last.
        after: called after each `feed`, without the lock.
    """

    def __init__(
        self, run: Run, period_s: float, feed: Feed, after: Callable[[], None] = lambda: None
    ) -> None:
        """Make a follower that does nothing until `start`."""
        self.history = History()
        self.lock = threading.RLock()
        """Held while new records are added to the history and passed on. Otherwise another thread that sends
        the history could send some of them twice."""
        self._after = after
        self._run = run
        self._feed = feed
        self._period_s = period_s
        self._cursor = START

    def start(self) -> None:
        """Begin to follow the run, and end with it."""
        follow(self._run, lambda: self._period_s, self.read)

    def read(self, last: bool) -> None:
        """Read the new records and pass them on. The first time, they are all that the history keeps of the
        past."""
        new: dict[SeriesKey, Series] = {}
        marks: list[Event] = []
        with self.lock:
            for records, cursor in self._run.reader.batches(self._cursor):
                self._cursor = cursor
                new_series, new_marks = self.history.add(records)
                for key, points in new_series.items():
                    new.setdefault(key, Series()).extend(points)
                marks += new_marks
            self._feed(new, marks, last)
        self._after()


class Panel(anywidget.AnyWidget):
    """The widget that draws a run while it goes on. Use `show` to display one.

    Args:
        run: the run to draw.
        slot: the display_id of the output that gets the picture at the end.
        show_buttons: whether the panel has Pause and Stop of its own.
        buttons: ids of widgets elsewhere that act on the run.
        on_state: called with the run's state, on the panel's thread, whenever it has changed.
        on_gone: called when the notebook has the picture and the widget is closed.
    """

    _esm = STATIC / "panel.js"
    _css = STATIC / "panel.css"
    key = traitlets.Unicode("").tag(sync=True)
    """An id that tells this panel from all others in a page."""
    slot = traitlets.Unicode("").tag(sync=True)
    show_buttons = traitlets.Bool(True).tag(sync=True)
    buttons = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """The ids of widgets elsewhere that act on the run. The page disables them when the kernel is gone."""
    system_charts = traitlets.List(traitlets.Dict()).tag(sync=True)
    plotly_gz = traitlets.Bytes(b"").tag(sync=True)
    """The Plotly bundle, only for kernels that cannot handle a request for it while a cell is running."""

    def __init__(
        self,
        run: Run,
        slot: str,
        show_buttons: bool = True,
        buttons: Sequence[str] = (),
        on_state: Callable[[str], None] = lambda state: None,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the widget; `follow` begins to update it once it is displayed."""
        self._run = run
        self._on_state = on_state
        self._on_gone = on_gone
        self._ids = SeriesIds()
        self._page_was_ready = False
        self._num_ranks_in_page = 0
        self._ticks = 0
        self._next_snapshot_tick = round(1 / TICK_S)
        self._sent_state = ""
        self._notified_state = ""
        """The state with which `on_state` was called last."""
        self._gone = False
        self._follower = Follower(run, TICK_S, self._update_page, after=self._notify_state)
        self._lock = self._follower.lock
        self._hears_page = has_subshells()
        """Whether the kernel handles messages of the page while a cell is running."""
        super().__init__(
            key=uuid.uuid4().hex,
            slot=slot,
            show_buttons=show_buttons,
            buttons=list(buttons),
            plotly_gz=b"" if self._hears_page else PLOTLY_GZ.read_bytes(),
            # A search does not train on samples, so there is no throughput to draw.
            system_charts=[
                line for line in LINES if line["id"] != "throughput" or "batch_size" not in run.config.UNUSED
            ],
        )
        answer_while_busy(self)
        self.on_msg(self._on_page_message)

    def follow(self) -> None:
        """Start to update the page. The output named `slot` must be displayed already, because the picture at
        the end replaces it."""
        self._follower.start()

    def text(self) -> str:
        """The run in one line."""
        with self._lock:
            return summary(self._run, self._follower.history)

    # Messages to the page.

    def _update_page(self, new: dict[SeriesKey, Series], marks: list[Event], last: bool) -> None:
        """Send the page the new points and marks, or a snapshot of the whole run. After the last ones, leave
        the picture in the notebook. The follower calls this five times a second."""
        if self._gone:
            return
        self._ticks += 1
        # The first head is written after one second, and then one in each period.
        if not last and self._ticks % round(HEAD_PERIOD_S / TICK_S) == round(1 / TICK_S):
            _update_output(_head(self._run, self._follower.history, self.slot))
        state = self._run.status
        state_changed, self._sent_state = state != self._sent_state, state
        if self._is_snapshot_due():
            self._send_snapshot()
        else:
            status_due = last or state_changed or self._ticks % round(STATUS_PERIOD_S / TICK_S) == 0
            self._send_delta(new, marks, status_due)
        if last:
            for output in _last_outputs(self._run, self._follower.history, self.slot):
                _update_output(output)
            # A page that was reloaded no longer knows the display, and asks for the picture itself.
            self.send({"type": "end"})

    def _notify_state(self) -> None:
        """Call `on_state` if the state has changed."""
        if self._notified_state != self._sent_state:
            self._notified_state = self._sent_state
            self._on_state(self._sent_state)

    def _is_snapshot_due(self) -> bool:
        """Whether to send a snapshot that no page has requested. A kernel that does not hear the page's
        'ready' during a cell sends one after 1, 3, 9 ... seconds."""
        if self._hears_page or self._page_was_ready or self._ticks < self._next_snapshot_tick:
            return False
        self._next_snapshot_tick *= 3
        return True

    def _send_delta(self, new: dict[SeriesKey, Series], marks: list[Event], status_due: bool) -> None:
        """Send new points and marks, the names of series that are new, and if `status_due` the states of the
        ranks. Nothing is sent if nothing is new."""
        num_announced = len(self._ids)
        buffers = encode(new, self._ids, self._num_points(new))
        content: dict[str, Any] = {"type": "delta"}
        if len(self._ids) > num_announced:
            content["series"] = self._ids.announce(num_announced)
        if marks:
            content["marks"] = [_mark(m) for m in marks]
        if status_due:
            content["status"] = self._status()
        if new or len(content) > 1:
            self.send(content, buffers)

    def _num_points_of_whole(self) -> int:
        """The number of points of each series that represent the whole run."""
        equal_share = MAX_POINTS_IN_MESSAGE // max(1, len(self._follower.history.series))
        return min(CAPACITY, max(MIN_POINTS_OF_WHOLE, equal_share))

    def _num_points(self, new: dict[SeriesKey, Series]) -> int:
        """The number of points of each series that show the new records as finely as the chart can: the same
        share of the points as the new records have of the x axis, in steps or in time.

        In the middle of a long run a tick is less than a pixel wide, so that a run of 1000 steps a second
        costs no more than one of 20. But after `attach` the new records are the whole run so far, and after
        a minute in which Python was held up they are that minute.
        """
        share = 0.0
        for key, series in new.items():
            whole = self._follower.history.series[key]
            for new_x, whole_x in ((series.steps, whole.steps), (series.times_s, whole.times_s)):
                span = whole_x[-1] - whole_x[0]
                share = max(share, (new_x[-1] - new_x[0]) / span if span else 1.0)
        return max(MIN_POINTS_OF_NEWS, math.ceil(self._num_points_of_whole() * min(share, 1.0)))

    def _send_snapshot(self) -> None:
        """Send all that a page needs to draw the run: the ranks, the thinned series, the marks and the
        states."""
        info = self._run.info
        self._num_ranks_in_page = len(info.devices)
        buffers = encode(self._follower.history.series, self._ids, self._num_points_of_whole())
        self.send(
            {
                "type": "snapshot",
                "run": {
                    "id": info.run_id,
                    "recipe": ", ".join(filter(None, [info.title, info.simulated])),
                    "started_s": info.started_s,
                    "kept": self._run.outlives_kernel,
                    "why_losses_differ": self._run.config.why_losses_differ,
                },
                "ranks": [
                    {
                        "color": rank_color(rank),
                        "label": device.label() if device.kind == "cuda" else f"CPU, {device.name}",
                        "kind": device.kind,
                        "memory_bytes": device.memory_bytes,
                    }
                    for rank, device in enumerate(info.devices)
                ],
                "series": self._ids.announce(),
                "marks": [_mark(m) for m in self._follower.history.marks],
                "status": self._status(),
            },
            buffers,
        )

    def _status(self) -> dict[str, Any]:
        """Return the state of the run and of each rank, with its progress and warnings, for a message to the
        page."""
        state = self._run.status
        info = self._run.info
        statuses = self._run.statuses()
        now = progress(info, state, statuses)
        lost = self._run.lost_ranks
        ranks = [
            {
                "state": wording.state(status),
                "step": status.step,
                "memory_bytes": wording.memory_bytes(status),
                "warning": wording.warning(status),
            }
            if status.rank not in lost
            else _LOST
            for status in statuses
        ]
        return {
            "state": state,
            "step": now.step,
            # 0 until the data have been read, if the length of the run is given in epochs.
            "total_steps": now.total_steps,
            "epoch": now.epoch,
            "num_epochs": now.num_epochs,
            # The other ranks wait for a rank that is lost.
            "samples_per_s": 0.0 if lost else now.samples_per_s,
            "eta": duration(now.eta_s) if now.eta_s is not None and not lost else "",
            "time_left": "" if state in FINAL_STATES else wording.time_left(self._run.time_left_s),
            "pace": wording.evaluated(statuses) or wording.pace(self._follower.history, len(statuses)),
            "hang": self._run.hang,
            # The page still shows ranks with which the run no longer goes on, because their host is lost.
            "ranks": [*ranks, *[_LOST] * (self._num_ranks_in_page - len(statuses))],
        }

    # Messages from the page. ipywidgets calls this on the thread of a subshell while a cell is running.

    def _on_page_message(self, _: Any, content: dict[str, Any], buffers: list[bytes]) -> None:
        """Answer a message of the page; the module's docstring lists them."""
        match content.get("type"):
            case "ready":
                with self._lock:
                    self._page_was_ready = True
                    self._send_snapshot()
                    if not content.get("plotly"):
                        self.send({"type": "plotly"}, [PLOTLY_GZ.read_bytes()])
                    if self._run.status in FINAL_STATES:
                        self.send({"type": "end"})
            case "command":
                self._carry_out(str(content.get("command")))
            case "bundle":
                with self._lock:
                    outputs = _last_outputs(self._run, self._follower.history, self.slot)
                    self.send({"type": "bundle", "outputs": outputs})
            case "stored":
                with self._lock:
                    self._gone = True
                self.close()
                self._on_gone()

    def _carry_out(self, command: str) -> None:
        """Carry out a button's command, or send the page the reason why the run refuses it."""
        methods = {"pause": self._run.pause, "resume": self._run.resume, "stop": self._run.stop}
        try:
            methods[command]()
        except NbgpuError as error:
            self.send({"type": "refused", "text": str(error)})


class _Output(TypedDict):
    """An output of the notebook: the id under which it is displayed, and what it shows."""

    slot: str
    data: dict[str, Any]
    metadata: dict[str, Any]


def _update_output(output: _Output) -> None:
    update_display(output["data"], metadata=output["metadata"], raw=True, display_id=output["slot"])


def _head(run: Run, history: History, slot: str) -> _Output:
    """The present head of a run, for the output above its panel."""
    final = run.info.run_id if run.status in FINAL_STATES else ""
    data = head_view.bundle(run, history, _handle_of(run))
    return {"slot": head_of(slot), "data": data, "metadata": slot_metadata(head_of(slot), final)}


def _last_outputs(run: Run, history: History, slot: str) -> list[_Output]:
    """The outputs that stay in the notebook: the head, and the curves in the panel's place."""
    curves = bundle(run, history)
    # A bundle without curves has only text, which is in the head as well.
    data = curves if "text/html" in curves else {}
    metadata = slot_metadata(slot, run.info.run_id)
    return [_head(run, history, slot), {"slot": slot, "data": data, "metadata": metadata}]


def _handle_of(run: Run) -> str:
    """An expression whose value is this run, for a later cell of this kernel; empty where there is none."""
    try:
        return "nbgpu.current().run" if clusters.current().run is run else ""
    except NoClusterError:
        return ""


def _mark(event: Event) -> dict[str, Any]:
    """Return an event as the page draws it: a mark at its step and time, with its text."""
    return {name: getattr(event, name) for name in ("rank", "time_s", "step", "kind", "text")}


class _TextView:
    """Shows a run without widgets: a few lines of text and, less often, a picture of the curves, both updated
    in place."""

    def __init__(self, run: Run, slot: str, on_state: Callable[[str], None]) -> None:
        self._run = run
        self._slot = slot
        self._on_state = on_state
        self._picture_due_mono_s = time.monotonic() + PICTURE_PERIOD_S
        self._follower = Follower(run, SUMMARY_PERIOD_S, self._update)
        self._follower.start()

    def _update(self, new: dict[SeriesKey, Series], marks: list[Event], last: bool) -> None:
        """Update the text, and the picture if it is due. At the end, leave the outputs that stay."""
        history = self._follower.history
        self._on_state(self._run.status)
        if last:
            for output in _last_outputs(self._run, history, self._slot):
                _update_output(output)
            return
        time_left = wording.time_left(self._run.time_left_s)
        lines = [summary(self._run, history), time_left, *wording.recent(history), self._run.hang]
        text = {"text/plain": "\n".join(filter(None, lines))}
        update_display(text, raw=True, display_id=head_of(self._slot))
        if time.monotonic() >= self._picture_due_mono_s:
            curves = bundle(self._run, history)
            picture = {kind: curves[kind] for kind in ("text/plain", "text/html") if kind in curves}
            update_display(picture, raw=True, display_id=self._slot)
            # The period begins after the drawing, which takes long if there is much to draw.
            self._picture_due_mono_s = time.monotonic() + PICTURE_PERIOD_S


def show(run: Run, on_state: Callable[[str], None] = lambda state: None) -> None:
    """Display the live panel of a run, or the curves of a run that is over.

    Args:
        on_state: called with the run's state, on another thread, whenever it may have changed.

    Raises:
        RunError: there is no IPython to display anything.
    """
    require_notebook("run.status and run.metrics()")
    slot = new_slot()
    if run.status in FINAL_STATES:
        for output in _last_outputs(run, history_of(run), slot):
            if output["data"]:
                display(output["data"], metadata=output["metadata"], raw=True)
    elif has_frontend():
        open_head(slot)
        panel = Panel(run, slot, on_state=on_state)
        display_in(slot, panel, text=panel.text())
        panel.follow()
    else:
        display({"text/plain": "starting"}, raw=True, display_id=head_of(slot))
        display({}, raw=True, display_id=slot)
        _TextView(run, slot, on_state)
