"""Cells with an `await` of their own.

To interrupt such a cell, ipykernel 7 looks for the thread of its subshells. An engine of ipyparallel has no
subshells: the request ends in an AttributeError and is never answered. Here the cell runs in a task on the
engine's event loop.
"""

from __future__ import annotations

import asyncio
from types import FrameType
from typing import Any

from nbgpu.engine.frames import RUNS_A_CELL, is_function

_cell: asyncio.Task[Any] | None = None
"""The running cell, if it awaits something."""
_was_interrupted = False


def install(shell: Any) -> None:
    """Have IPython's `should_run_async`, which compiles a cell, return False at once for cells without the
    words 'await' and 'async': to compile every cell would take longer than to run an empty one."""
    should_run_async = shell.should_run_async
    shell.should_run_async = lambda raw_cell, **options: (
        may_await(options.get("transformed_cell") or raw_cell) and should_run_async(raw_cell, **options)
    )


def may_await(code: str) -> bool:
    """Return whether a cell has to be compiled to find out if it contains an `await`; False for most
    cells."""
    return "await" in code or "async" in code


def _transform_awaiting(shell: Any, code: str) -> str | None:
    """Return a cell's code, with IPython's syntax turned into Python's, if the cell contains an `await`; None
    for any other cell."""
    if not may_await(code):
        return None
    try:
        transformed: str = shell.transform_cell(code)
    except Exception:  # noqa: BLE001 - IPython raises and shows it again when it runs the cell
        return None
    return transformed if shell.should_run_async(code, transformed_cell=transformed) else None


async def run(shell: Any, code: str, silent: bool, store_history: bool) -> Any:
    """Run a cell that contains an `await` in a task on the event loop, so that `interrupt` can cancel it;
    return IPython's result, and None for any other cell, which is not run here.

    `shell.run_cell_async` leaves out two things that a cell needs: the last traceback is reset before it, and
    the events 'post_execute' and 'post_run_cell' are triggered after it.

    Args:
        shell: the rank's.
        code: the cell's text.
        silent: as for IPython's `run_cell`: the cell gets no place in the history, and 'pre_run_cell' and
            'post_run_cell' are not triggered. 'post_execute' always is.
        store_history: whether the cell gets a place in the history.
    """
    global _cell, _was_interrupted
    transformed = _transform_awaiting(shell, code)
    if transformed is None:
        return None
    shell._last_traceback, shell._last_traceback_during_displayhook = None, False
    _was_interrupted = False
    _cell = asyncio.ensure_future(
        shell.run_cell_async(code, store_history=store_history, silent=silent, transformed_cell=transformed)
    )
    try:
        result = await _cell
    finally:
        _cell = None
    # A cell that is interrupted ends with KeyboardInterrupt, and not with the error of its task.
    if _was_interrupted and isinstance(result.error_in_exec, asyncio.CancelledError):
        result.error_in_exec = KeyboardInterrupt().with_traceback(result.error_in_exec.__traceback__)
    shell.events.trigger("post_execute")
    if not silent:
        shell.events.trigger("post_run_cell", result)
    return result


def was_interrupted() -> bool:
    """Return whether an awaiting cell is running and was interrupted already."""
    return _cell is not None and _was_interrupted


def interrupt() -> None:
    """Cancel the running cell if it contains an `await`. Call in a signal's handler, on the main thread."""
    if _cell is not None:
        # This wakes the event loop, which may be waiting for something that never comes.
        _cell.get_loop().call_soon_threadsafe(_cancel, _cell)


def _cancel(cell: asyncio.Task[Any]) -> None:
    """Cancel the cell's task, on the event loop, if the cell is suspended within its own code."""
    # A cell that is cancelled before its first line or after its last would end without a result.
    if any(is_function(frame, RUNS_A_CELL) for frame in frames()[:-1]):
        global _was_interrupted
        _was_interrupted = True
        cell.cancel()


def frames() -> list[FrameType]:
    """Return the frames of the suspended cell, the outermost first; empty if no cell is suspended at an
    `await`.

    The frames of a suspended coroutine are on no thread's stack; each coroutine refers to the one that it
    awaits.
    """
    suspended: list[FrameType] = []
    coroutine: Any = _cell.get_coro() if _cell is not None else None
    while (frame := _attribute(coroutine, "cr_frame", "gi_frame", "ag_frame")) is not None:
        suspended.append(frame)
        coroutine = _attribute(coroutine, "cr_await", "gi_yieldfrom", "ag_await")
    # A single frame belongs to a cell that has not begun, or is running.
    return suspended if len(suspended) > 1 else []


def _attribute(coroutine: Any, *names: str) -> Any:
    """Return the first of these attributes that an object has: coroutines, generators and asynchronous
    generators name their frame differently."""
    return next((getattr(coroutine, name) for name in names if hasattr(coroutine, name)), None)
