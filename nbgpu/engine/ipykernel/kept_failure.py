"""The error of the last cell, which is kept with its functions' variables until the next cell, for
`%debug`."""

from __future__ import annotations

import sys
from traceback import walk_tb
from types import FrameType

from nbgpu.engine.memory import usage as memory
from nbgpu.machine.clock import notebooks_time_s

_kept: tuple[float, BaseException] | None = None
"""The time at which the last cell failed, by the notebook's clock, and its error."""


def keep(error: BaseException) -> None:
    """Keep the error that a cell has just raised."""
    global _kept
    _kept = notebooks_time_s(), error
    make_last()


def make_last(error: BaseException | None = None) -> None:
    """Make an error Python's last error (`sys.last_value`); with None the kept error, which errors in the
    debugger may have replaced."""
    if error is None and _kept is not None:
        _, error = _kept
    if error is not None:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error


def kept() -> tuple[float, str] | None:
    """Return the time and the type of the kept error; None if there is none."""
    return None if _kept is None else (_kept[0], type(_kept[1]).__name__)


def kept_frames() -> list[FrameType]:
    """Return the frames of the kept error."""
    return [] if _kept is None else [frame for frame, _ in walk_tb(_kept[1].__traceback__)]


def forget() -> None:
    """Release the variables in the frames of the kept error. Python's last error stays, for `%tb` and the
    like."""
    global _kept
    if _kept is not None:
        memory.let_go(_kept[1])
        _kept = None
