"""The kernel's side of the live panel: follow a run, update the page five times a second, and leave a picture
behind.

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

The buffers of points are described in `comm_protocol.py`. Nothing here ever waits for a page's answer.
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
"""The period in which text is updated where no page shows widgets."""
PICTURE_PERIOD_S = 20.0
"""The period in which the picture of the curves is replaced there."""
HEAD_PERIOD_S = 10.0
"""The period in which the notebook gets the head that remains where the kernel dies."""
POINTS_PER_TICK = 4
"""The number of points of each series that a message may always have."""

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
    """Calls back on a thread of its own with the new records of a run, until the run is over.

    Args:
        run: the run to follow.
        period_s: the time between two calls.
        feed: called with the new points, the new marks, and whether these are the last, while `lock` is held.
        after: called after each `feed`, without the lock.
    """

    def __init__(
        self, run: Run, period_s: float, feed: Feed, after: Callable[[], None] = lambda: None
    ) -> None:
        """Make the thread; `start` begins to follow the run."""
        self.history = History()
        self.lock = threading.RLock()
        """Held while the history grows and new records are passed on, because another thread that sends the
        history would send a part of it twice."""
        self._after = after
        self._run = run
        self._feed = feed
        self._period_s = period_s
        self._cursor = START
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nbgpu-panel", daemon=True)

    def start(self) -> None:
        """Begin to follow the run, and end with it."""
        self._thread.start()
        self._run.on_end(self._end)

    def _follow(self) -> None:
        while not self._ended.wait(self._period_s):
            self._take(last=False)

    def _take(self, last: bool) -> None:
        with self.lock:
            news, marks = self._new_points()
            self._feed(news, marks, last)
        self._after()

    def _new_points(self) -> tuple[dict[SeriesKey, Series], list[Event]]:
        """Return the new points and marks. The first time, they are as much of the past as the history
        keeps."""
        news: dict[SeriesKey, Series] = {}
        marks: list[Event] = []
        for records, cursor in self._run.reader.batches(self._cursor):
            self._cursor = cursor
            series, marked = self.history.add(records)
            for key, points in series.items():
                news.setdefault(key, Series()).extend(points)
            marks += marked
        return news, marks

    def _end(self, run: Run) -> None:
        self._ended.set()
        self._thread.join()
        self._take(last=True)


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
        self._num_chips = 0
        """The number of ranks that the page was told of."""
        self._ticks = 0
        self._send_all_at_tick = round(1 / TICK_S)
        self._last_state = ""
        self._shown_state = ""
        self._gone = False
        self._follower = Follower(run, TICK_S, self._tell, after=self._notify_state)
        self._lock = self._follower.lock
        can_be_asked = has_subshells()
        super().__init__(
            key=uuid.uuid4().hex,
            slot=slot,
            show_buttons=show_buttons,
            buttons=list(buttons),
            plotly_gz=b"" if can_be_asked else PLOTLY_GZ.read_bytes(),
            # A search goes over no samples, and has no place for their rate.
            system_charts=[
                line for line in LINES if line["id"] != "throughput" or "batch_size" not in run.config.UNUSED
            ],
        )
        self._can_be_asked = can_be_asked
        answer_while_busy(self)
        self.on_msg(self._on_page_message)

    def follow(self) -> None:
        """Start to update the page. The output named `slot` must be displayed by then, or the picture is
        lost."""
        self._follower.start()

    def text(self) -> str:
        """The run in one line."""
        with self._lock:
            return summary(self._run, self._follower.history)

    # Messages to the page.

    def _tell(self, new: dict[SeriesKey, Series], marks: list[Event], last: bool) -> None:
        """Send the page what is new, and at times everything. The follower calls this five times a second,
        and for the last time when the run is over, which leaves the still picture in the notebook."""
        if self._gone:
            return
        self._ticks += 1
        # The first head is written after one second, and then one in each period.
        if not last and self._ticks % round(HEAD_PERIOD_S / TICK_S) == round(1 / TICK_S):
            _put(_head(self._run, self._follower.history, self.slot))
        state = self._run.status
        state_changed, self._last_state = state != self._last_state, state
        if self._should_send_all():
            self._send_snapshot()
        else:
            status_due = last or state_changed or self._ticks % round(STATUS_PERIOD_S / TICK_S) == 0
            self._send_delta(new, marks, status_due)
        if last:
            self._leave_picture()

    def _notify_state(self) -> None:
        """Call `on_state` if the state has changed."""
        if self._shown_state != self._last_state:
            self._shown_state = self._last_state
            self._on_state(self._last_state)

    def _should_send_all(self) -> bool:
        """Whether to send everything without a request, which happens after 1, 3, 9 ... seconds where the
        kernel cannot handle the page's 'ready' during a cell."""
        if self._can_be_asked or self._page_was_ready or self._ticks < self._send_all_at_tick:
            return False
        self._send_all_at_tick *= 3
        return True

    def _send_delta(self, new: dict[SeriesKey, Series], marks: list[Event], status_due: bool) -> None:
        """Send new points and marks, the names of series that are new, and at `status_due` the states of the
        ranks. Nothing is sent if nothing is new."""
        num_known = len(self._ids)
        buffers = encode(new, self._ids, self._points_for(new))
        content: dict[str, Any] = {"type": "delta"}
        if len(self._ids) > num_known:
            content["series"] = self._ids.announce(num_known)
        if marks:
            content["marks"] = [_mark(m) for m in marks]
        if status_due:
            content["status"] = self._status()
        if new or len(content) > 1:
            self.send(content, buffers)

    def _points_of_whole(self) -> int:
        """The number of points of each series that represent the whole run."""
        fair = MAX_POINTS_IN_MESSAGE // max(1, len(self._follower.history.series))
        return min(CAPACITY, max(MIN_POINTS_OF_WHOLE, fair))

    def _points_for(self, new: dict[SeriesKey, Series]) -> int:
        """The number of points of each series that show the new records as finely as the chart can.

        In the middle of a long run a moment is less than a pixel wide, and a run of 1000 steps a second costs
        no more than one of 20. But the new records may also be a whole past, as after attach, or a minute in
        which Python stood still.
        """
        whole = self._follower.history.series
        share = 0.0
        for key, series in new.items():
            for mine, all_of_it in ((series.steps, whole[key].steps), (series.times_s, whole[key].times_s)):
                span = all_of_it[-1] - all_of_it[0]
                share = max(share, (mine[-1] - mine[0]) / span if span else 1.0)
        return max(POINTS_PER_TICK, math.ceil(self._points_of_whole() * min(share, 1.0)))

    def _send_snapshot(self) -> None:
        """Send all that a page needs to draw the run from nothing: the ranks, the thinned series, the marks
        and the states."""
        info = self._run.info
        self._num_chips = len(info.devices)
        buffers = encode(self._follower.history.series, self._ids, self._points_of_whole())
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
        return {
            "state": state,
            "step": now.step,
            # It is not known before the data are, where the length is given in epochs.
            "total_steps": now.total_steps,
            "epoch": now.epoch,
            "num_epochs": now.num_epochs,
            # The others wait for a rank that is lost.
            "samples_per_s": 0.0 if lost else now.samples_per_s,
            "eta": duration(now.eta_s) if now.eta_s is not None and not lost else "",
            "time_left": "" if state in FINAL_STATES else wording.time_left(self._run.time_left_s),
            "pace": wording.evaluated(statuses) or wording.pace(self._follower.history, len(statuses)),
            "hang": self._run.hang,
            "ranks": [
                _LOST
                if s.rank in lost
                else {
                    "state": wording.state(s),
                    "step": s.step,
                    "memory_bytes": wording.memory_bytes(s),
                    "warning": wording.warning(s),
                }
                for s in statuses
            ]
            # The page goes on showing ranks that the run has lost with their host.
            + [_LOST] * (self._num_chips - len(statuses)),
        }

    def _leave_picture(self) -> None:
        """Replace the widget in the notebook with the still picture."""
        for output in _last_outputs(self._run, self._follower.history, self.slot):
            _put(output)
        # A page that was reloaded no longer knows the display, and asks for the picture itself.
        self.send({"type": "end"})

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
                self._obey(str(content.get("command")))
            case "bundle":
                with self._lock:
                    outputs = _last_outputs(self._run, self._follower.history, self.slot)
                    self.send({"type": "bundle", "outputs": outputs})
            case "stored":
                with self._lock:
                    self._gone = True
                self.close()
                self._on_gone()

    def _obey(self, command: str) -> None:
        """Carry out a button's command, or tell the page why the run refuses."""
        asked = {"pause": self._run.pause, "resume": self._run.resume, "stop": self._run.stop}
        try:
            asked[command]()
        except NbgpuError as error:
            self.send({"type": "refused", "text": str(error)})


class _Output(TypedDict):
    """An output of the notebook: the id under which it is displayed, and what it shows."""

    slot: str
    data: dict[str, Any]
    metadata: dict[str, Any]


def _put(output: _Output) -> None:
    update_display(output["data"], metadata=output["metadata"], raw=True, display_id=output["slot"])


def _head(run: Run, history: History, slot: str) -> _Output:
    """The head of a run as it is now, for the output above its panel."""
    final = run.info.run_id if run.status in FINAL_STATES else ""
    data = head_view.bundle(run, history, _handle_of(run))
    return {"slot": head_of(slot), "data": data, "metadata": slot_metadata(head_of(slot), final)}


def _last_outputs(run: Run, history: History, slot: str) -> list[_Output]:
    """The outputs that stay in the notebook: the head, and the curves in the panel's place."""
    # Without curves there is nothing to say that the head does not.
    curves = bundle(run, history)
    if "text/html" not in curves:
        curves = {}
    metadata = slot_metadata(slot, run.info.run_id)
    return [_head(run, history, slot), {"slot": slot, "data": curves, "metadata": metadata}]


def _handle_of(run: Run) -> str:
    """An expression whose value is this run, for a later cell of this kernel; empty where there is none."""
    try:
        return "nbgpu.current().run" if clusters.current().run is run else ""
    except NoClusterError:
        return ""


def _mark(event: Event) -> dict[str, Any]:
    """Return an event as the page draws it: a mark at its step and time, with its text."""
    return {name: getattr(event, name) for name in ("rank", "time_s", "step", "kind", "text")}


class _TextLine:
    """Follows a run where no page shows widgets, with a few lines of text every few seconds, and with a
    picture of the curves that is replaced in place now and then."""

    def __init__(self, run: Run, slot: str, on_state: Callable[[str], None]) -> None:
        self._run = run
        self._slot = slot
        self._on_state = on_state
        self._picture_due_mono_s = time.monotonic() + PICTURE_PERIOD_S
        self._follower = Follower(run, SUMMARY_PERIOD_S, self._tell)
        self._follower.start()

    def _tell(self, new: dict[SeriesKey, Series], marks: list[Event], last: bool) -> None:
        """Show the run in a few lines of text, and now and then its curves; at the end leave the outputs that
        stay."""
        history = self._follower.history
        self._on_state(self._run.status)
        if last:
            for output in _last_outputs(self._run, history, self._slot):
                _put(output)
            return
        time_left = wording.time_left(self._run.time_left_s)
        lines = [summary(self._run, history), time_left, *wording.recent(history), self._run.hang]
        told = {"text/plain": "\n".join(filter(None, lines))}
        update_display(told, raw=True, display_id=head_of(self._slot))
        if time.monotonic() >= self._picture_due_mono_s:
            curves = bundle(self._run, history)
            picture = {kind: curves[kind] for kind in ("text/plain", "text/html") if kind in curves}
            update_display(picture, raw=True, display_id=self._slot)
            # After the drawing, which takes as long as there is much to draw.
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
        _TextLine(run, slot, on_state)
