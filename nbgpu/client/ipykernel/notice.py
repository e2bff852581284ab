"""Lines below a cell's output that change in place: notices, and the progress of what a cell waits for."""

from __future__ import annotations

import html
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.errors import NbgpuError

PERIOD_S = 1.0
"""The least time between two changes of a progress line."""


class _Display:
    """A display below the cell, which each new content replaces."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, data: dict[str, str]) -> None:
        if self._handle is None:
            from IPython.display import DisplayHandle

            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


class Notice:
    """A line below a cell's output that changes in place, and can be removed.

    In a kernel the line is a display, which is removed from the page and the notebook file alike, so that no
    notice of a past event stays in a saved notebook. Outside of a kernel text is printed, which stays, so
    only the first text of a notice is.
    """

    def __init__(self) -> None:
        self._text = ""
        self._display = _Display()

    def show(self, text: str) -> None:
        """Show the text in place of the previous one, or remove the line if the text is empty."""
        if text == self._text:
            return
        is_new, self._text = not self._text, text
        if not hasattr(ipython_shell.current(), "kernel"):
            if is_new:
                sys.stderr.write(f"{text}\n")
            return
        # Send HTML as well: an empty plain text would still take up a line of the page.
        data = {"text/plain": text, "text/html": f"<b>{html.escape(text)}</b>" if text else ""}
        self._display.show(data)


@dataclass(frozen=True)
class Progress:
    """The progress of some work."""

    text: str
    share: float | None = None
    """The share that is done, from 0 to 1; None where that is not known."""


class ProgressLine:
    """A line about progress that changes in place. The last text stays.

    In a kernel it is a display, which the page and the notebook file update alike. In a terminal it is the
    last line of stderr. If stderr is a file, as in a job, and on other threads than the main one, nothing is
    shown.

    Args:
        describe: returns the present progress. It may read files.
        is_wanted: False to show nothing.
    """

    def __init__(self, describe: Callable[[], Progress], is_wanted: bool = True) -> None:
        self._describe = describe
        is_main = threading.current_thread() is threading.main_thread()
        self._in_kernel = hasattr(ipython_shell.current(), "kernel")
        self._is_shown = is_wanted and is_main and (self._in_kernel or sys.stderr.isatty())
        self._due_mono_s = 0.0
        self._display = _Display()
        self._shown: Progress | None = None

    def refresh(self) -> None:
        """Show the present progress, at most once a second."""
        if self._is_shown and time.monotonic() >= self._due_mono_s:
            self._show(is_last=False)
            self._due_mono_s = time.monotonic() + PERIOD_S

    def finish(self) -> None:
        """Show the final progress, which stays."""
        if self._is_shown:
            self._show(is_last=True)

    def _show(self, is_last: bool) -> None:
        """Show the present progress, as a display in a kernel and as the last line of stderr in a terminal.
        The last line is written in full and without a bar."""
        try:
            now = self._describe()
        except (OSError, NbgpuError):
            # The work itself reports a file that cannot be read; the line keeps its last text.
            if self._shown is None:
                return
            now = self._shown
        if not self._in_kernel:
            self._write(now.text, is_last)
        elif now != self._shown or is_last:
            self._show_bar(now, is_last)
        self._shown = now

    def _write(self, text: str, is_last: bool) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text}\n" if is_last else f"\r\x1b[K{text[:width]}")
        sys.stderr.flush()

    def _show_bar(self, now: Progress, is_last: bool) -> None:
        bar = (
            "" if is_last or now.share is None else f'<progress max="1" value="{now.share:.3f}"></progress> '
        )
        data = {"text/plain": now.text, "text/html": f"<div>{bar}{html.escape(now.text)}</div>"}
        self._display.show(data)
