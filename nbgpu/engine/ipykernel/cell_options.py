"""The options that the notebook sends to a rank with a cell's code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbgpu.engine.ipykernel import input_requests, tracebacks
from nbgpu.protocol.records import CellOptions


def follow(kernel: Any, timeline: Callable[[], AbstractContextManager[None]]) -> None:
    """Give the engine's cells the notebook's execution counts, and what the options ask for.

    Args:
        kernel: the engine's.
        timeline: a context in which the rank notes what it does.
    """
    shell, do_execute = kernel.shell, kernel.do_execute
    # The history database, which is gone with the engine, accepts each number only once.
    shell.history_manager.enabled = False

    async def do_execute_with_options(*args: Any, **kwargs: Any) -> Any:
        options = CellOptions(**kernel.get_parent("shell")["metadata"].get(CellOptions.METADATA, {}))
        tracebacks.full = options.full
        input_requests.are_answered = options.are_answered
        if options.number:
            _count_on_from(shell, options.number)
        try:
            with timeline() if options.timeline else nullcontext():
                return await do_execute(*args, **kwargs)
        finally:
            input_requests.are_answered = False

    kernel.do_execute = do_execute_with_options


def _count_on_from(shell: Any, number: int) -> None:
    shell.execution_count = number
    history = shell.history_manager
    for typed in (history.input_hist_parsed, history.input_hist_raw):
        typed += [""] * (number - len(typed))
    # A notebook whose kernel was restarted counts from 1 again.
    history.output_hist.pop(number, None)
