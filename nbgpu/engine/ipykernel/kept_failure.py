"""What the last cell raised, which is kept with the variables of its functions until the next cell, for `%debug`."""

from __future__ import annotations

import sys
import time
from traceback import walk_tb
from types import FrameType

from nbgpu.engine.memory import usage as memory

_kept: tuple[float, BaseException] | None = None
"""When a cell failed, and with what."""


def keep(error: BaseException) -> None:
    """Keep what a cell has just raised."""
    global _kept
    _kept = time.time(), error


def make_last() -> None:
    """Make what is kept Python's last error: whatever was raised since, also in the debugger, took its place."""
    if _kept is not None:
        _, error = _kept
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error


def kept() -> tuple[float, str] | None:
    """When the last cell failed here, and with what; None where nothing is kept of it."""
    return None if _kept is None else (_kept[0], type(_kept[1]).__name__)


def kept_frames() -> list[FrameType]:
    """The frames that the last failure keeps."""
    return [] if _kept is None else [frame for frame, _ in walk_tb(_kept[1].__traceback__)]


def forget() -> None:
    """Give back what the last failure keeps."""
    global _kept
    if _kept is not None:
        memory.let_go(_kept[1])
        _kept = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
