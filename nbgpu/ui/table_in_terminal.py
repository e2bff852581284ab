"""A sweep or a study in a terminal: a table that changes while it goes on, and lines where there is no
terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nbgpu.text.console import say, wrapped
from nbgpu.ui.run.terminal import LINE_PERIOD_S

if TYPE_CHECKING:
    from nbgpu.ui.followed import Followed

_PERIOD_S = 0.5


def follow(followed: Followed, console: Console, lines: Callable[[], list[str]], stopping: str) -> None:
    """Show the table of a sweep or a study until that is over. The first Ctrl-C stops the work, and a second
    one leaves at once.

    Args:
        followed: the sweep or the study.
        console: the terminal, or a file, which gets one line from time to time.
        lines: returns the present table.
        stopping: a sentence about the effect of the first Ctrl-C.
    """

    def view() -> Text:
        return Text(wrapped("\n".join([*lines(), followed.describe()]), console.width))

    if console.is_terminal:
        with Live(view(), console=console, auto_refresh=False, transient=True) as live:
            _wait(followed, console, lambda: live.update(view(), refresh=True), _PERIOD_S, stopping)
    else:
        _wait(followed, console, lambda: say(console, followed.describe()), LINE_PERIOD_S, stopping)


def _wait(
    followed: Followed, console: Console, show: Callable[[], None], period_s: float, stopping: str
) -> None:
    """Show the state in each period until all is over. The first Ctrl-C stops the work, and the second is
    raised."""
    is_stopping = False
    due_s = time.monotonic()
    while not followed.over:
        try:
            if time.monotonic() >= due_s:
                due_s += period_s
                show()
            time.sleep(min(period_s, _PERIOD_S))
        except KeyboardInterrupt:
            if is_stopping:
                raise
            is_stopping = True
            followed.stop()
            say(console, stopping)
