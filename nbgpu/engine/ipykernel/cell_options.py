"""The options that the notebook sends to a rank with a cell's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from nbgpu.engine.ipykernel import input_requests, tracebacks
from nbgpu.protocol.records import CellOptions

_timeline: Callable[[], AbstractContextManager[None]] = nullcontext


def install(shell: Any, timeline: Callable[[], AbstractContextManager[None]]) -> None:
    """Prepare the shell to follow the options.

    Args:
        shell: the rank's.
        timeline: returns a context in which the rank notes what it does.
    """
    global _timeline
    _timeline = timeline
    # The history database, which is gone with the engine, accepts each number only once.
    shell.history_manager.enabled = False


@contextmanager
def applied(metadata: Mapping[str, Any], shell: Any) -> Iterator[None]:
    """Give a cell the notebook's execution count, and what the metadata of its request ask for."""
    options = CellOptions(**metadata.get(CellOptions.METADATA, {}))
    tracebacks.full = options.full
    input_requests.are_answered = options.are_answered
    if options.number:
        _count_on_from(shell, options.number)
    try:
        with _timeline() if options.timeline else nullcontext():
            yield
    finally:
        input_requests.are_answered = False


def _count_on_from(shell: Any, number: int) -> None:
    shell.execution_count = number
    history = shell.history_manager
    for typed in (history.input_hist_parsed, history.input_hist_raw):
        typed += [""] * (number - len(typed))
    # A notebook whose kernel was restarted counts from 1 again.
    history.output_hist.pop(number, None)
