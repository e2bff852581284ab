"""Two threads that end a cluster in time: one after a time without use, and one before the time limit of its
hosts.

A cluster that is not used is ended, so that its GPUs are free for others (setting `release_after_s`).
Otherwise it would stay: JupyterLab keeps the kernel of a notebook that is closed, and the kernel keeps the
cluster. A cluster is in use while any cell of the notebook runs, while a rank works or a run goes on, and
when a page asks for a completion or for help on a name, as it does while a person types.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.client.ipykernel.notice import Notice
from nbgpu.text.durations import duration

_log = logging.getLogger("nbgpu.cluster")

_LONGEST_WARNING_S = 60.0
_SHARE_OF_WARNING = 0.2
"""The share of `release_after_s` before the end at which the person is warned."""
WARNING_BEFORE_END_S = 120.0
"""The time before the hosts' time limit at which saving begins: enough for a checkpoint of a large model, and
for the variables."""
_ASK_PERIOD_S = 60.0
"""The period in which the time left is asked for."""
_RUN_PATIENCE_S = 90.0
"""The longest wait for ranks that are not free to save their variables."""
_RUN_POLL_S = 0.1
"""The period in which the ranks are checked during this wait."""


class IdleRelease:
    """Watches whether a cluster is used, on a thread of its own, and ends it when it is not.

    Args:
        after_s: the time without use after which the cluster ends, in seconds.
        is_working: returns whether a run goes on or a rank works. It may take a second, and is called on the
            thread.
        release: ends the cluster. It is called on the kernel's event loop, and so never while a cell runs;
            without a loop, on this object's thread.
    """

    def __init__(self, after_s: float, is_working: Callable[[], bool], release: Callable[[], None]) -> None:
        self._after_s = after_s
        self._warning_s = min(_LONGEST_WARNING_S, _SHARE_OF_WARNING * after_s)
        """The time from the warning to the end, in seconds."""
        self._notice = Notice()
        self._showing = threading.Lock()
        self._is_working = is_working
        self._release = release
        self._lock = threading.RLock()
        self._used_mono_s = time.monotonic()
        self._shell: Any = ipython_shell.current()
        # The cell that starts the cluster has already begun.
        self._cell_runs = self._shell is not None and threading.current_thread() is threading.main_thread()
        self._closing = threading.Event()
        self._loop = ipython_shell.event_loop()
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._cell_begins)
            self._shell.events.register("post_run_cell", self._cell_ends)
        self._thread = threading.Thread(target=self._watch, name="nbgpu-release", daemon=True)
        self._thread.start()

    def used(self) -> None:
        """Record that the cluster is used now. If it is being ended, wait for that."""
        with self._lock:
            self._used_mono_s = time.monotonic()
        self._show("")

    def close(self) -> None:
        """End the watch; later calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._shell is not None:
            self._shell.events.unregister("pre_run_cell", self._cell_begins)
            self._shell.events.unregister("post_run_cell", self._cell_ends)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._show("")

    def _cell_begins(self, info: Any) -> None:
        self._cell_runs = True
        # Without history, an extension of the page has run the cell, and not the person.
        if info.store_history:
            self.used()

    def _cell_ends(self, result: Any) -> None:
        self._cell_runs = False
        if result.info.store_history:
            self.used()

    @property
    def _left_s(self) -> float:
        return self._used_mono_s + self._after_s - time.monotonic()

    def _show(self, text: str) -> None:
        with self._showing:
            self._notice.show(text)

    def _watch(self) -> None:
        """Warn the person when most of the time without use has passed, and release the cluster when all of
        it has. Each use begins the time anew, with a new warning. This is the function of the thread."""
        warned_use_mono_s: float | None = None
        """The last use before the newest warning."""
        while True:
            left_at_step_s = 0.0 if warned_use_mono_s == self._used_mono_s else self._warning_s
            if self._closing.wait(max(0.0, self._left_s - left_at_step_s)):
                return
            used_mono_s = self._used_mono_s
            is_warned = warned_use_mono_s == used_mono_s
            if self._left_s > (0.0 if is_warned else self._warning_s):
                continue  # it was used during the wait
            if self._is_in_use():
                # The lock is not taken here: the thread that ends the cluster holds it, and waits in `close`
                # for this thread.
                self._used_mono_s = time.monotonic()
                self._show("")
            elif self._used_mono_s != used_mono_s:
                continue  # it was used while `_is_in_use` looked, which may take a second
            elif not is_warned:
                warned_use_mono_s = used_mono_s
                end = time.strftime("%H:%M:%S", time.localtime(time.time() + self._left_s))
                self._show(
                    f"The cluster ends at {end}, because nothing uses it (release_after_s). Any cell or typing keeps it"
                )
            elif self._loop is None or self._loop.is_closed():
                self._release_if_unused()
            else:
                self._loop.call_soon_threadsafe(self._release_if_unused)
                # If the loop is held up for that long, this is repeated.
                self._closing.wait(self._after_s)

    def _is_in_use(self) -> bool:
        """Return whether a cell runs or a rank works. If that cannot be found out, the cluster counts as in
        use."""
        try:
            return self._cell_runs or self._is_working()
        except OSError as error:  # such as too many open files in this process
            _log.warning("whether the ranks work cannot be seen, and the cluster goes on: %s", error)
            return True

    def _release_if_unused(self) -> None:
        """Release the cluster, unless it was used before the kernel's event loop called this."""
        with self._lock:
            if self._left_s <= 0 and not self._cell_runs and not self._closing.is_set():
                self._release()


def tell_in_next_cell(text: str) -> None:
    """Print a text below the next cell that the person runs; do nothing if there is no IPython."""
    shell: Any = ipython_shell.current()
    if shell is None:
        return

    def tell(info: Any) -> None:
        if info.store_history:
            shell.events.unregister("pre_run_cell", tell)
            print(text, file=sys.stderr)  # noqa: T201 - printing is its purpose

    shell.events.register("pre_run_cell", tell)


class TimeLimitWatch:
    """Asks periodically, on a thread, for the time until the hosts are taken away; when little is left, warns
    the person and saves, once.

    Args:
        time_left_s: returns the time left, in seconds; None if there is no limit or it is not known.
        warn: called on the thread, with a clause about the time left: 'the job has 2 min left'.
        can_save: returns whether the ranks are free for `save`. The thread waits for that, but at most for a
            minute and a half.
        save: called after this wait with the same clause, even if the ranks are not free. It is called on the
            kernel's event loop, and so never while a cell runs; without a loop it is not called.
    """

    def __init__(
        self,
        time_left_s: Callable[[], float | None],
        warn: Callable[[str], None],
        can_save: Callable[[], bool],
        save: Callable[[str], None],
    ) -> None:
        self._time_left_s = time_left_s
        self._warn = warn
        self._can_save = can_save
        self._save = save
        self._closing = threading.Event()
        self._end_mono_s: float | None = None
        self._loop = ipython_shell.event_loop()
        self._thread = threading.Thread(target=self._watch, name="nbgpu-time-limit", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float | None:
        """The time until the hosts are taken away, in seconds, by the newest answer, which is at most a
        minute old; None if there is no limit or it is not known."""
        return None if self._end_mono_s is None else max(0.0, self._end_mono_s - time.monotonic())

    def close(self) -> None:
        """End the watch; later calls do nothing."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        """Ask for the time left until it is short; then warn, wait for the ranks, and save. This is the
        function of the thread."""
        while (left_s := self._update_time_left()) is None or left_s > WARNING_BEFORE_END_S:
            pause_s = _ASK_PERIOD_S if left_s is None else min(_ASK_PERIOD_S, left_s - WARNING_BEFORE_END_S)
            if self._closing.wait(pause_s):
                return
        reason = f"the job has {duration(left_s)} left"
        self._warn(reason)
        give_up_s = time.monotonic() + _RUN_PATIENCE_S
        while not self._can_save() and time.monotonic() < give_up_s:
            if self._closing.wait(_RUN_POLL_S):
                return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._save_if_open, reason)

    def _update_time_left(self) -> float | None:
        """Ask for the time left, and return it; None if it is not known. After an error, return the time left
        by the last answer."""
        try:
            left_s = self._time_left_s()
        except OSError as error:  # such as too many open files in this process
            _log.warning("how long the hosts will stay cannot be asked, and is asked again: %s", error)
            return self.left_s
        self._end_mono_s = None if left_s is None else time.monotonic() + left_s
        return left_s

    def _save_if_open(self, reason: str) -> None:
        if not self._closing.is_set():
            self._save(reason)
