"""Tells the person's code from libraries' in Python frames and tracebacks, and finds the functions that run
the person's code."""

from __future__ import annotations

import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType

from nbgpu.package import PACKAGE

_PACKAGE = f"{PACKAGE}/"
# Each ends with a slash: a folder nbgpu_runs beside the package is no part of it.
_LIBRARIES = (*{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")}, _PACKAGE)

RUNS_A_CELL = ("IPython/core/interactiveshell.py", "run_code")
"""The function that runs a cell's code: the end of its file's path, and its name."""
RUNS_A_CALL = ("ipyparallel/engine/kernel.py", "do_apply")
"""The function that runs a call from `Cluster.apply`."""
RUNS_A_TASK = ("asyncio/events.py", "_run")
"""The function that advances a task of the event loop by one step, and runs its callbacks."""
IMPORTS_A_MODULE = ("<frozen importlib._bootstrap>", "_load_unlocked")
"""The function that runs a module's code; its variable `spec` names the module."""
TAKES_A_REQUEST = ("ipykernel/kernelbase.py", "dispatch_shell")
"""The function in which the kernel answers a request."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


def is_function(frame: FrameType, function: tuple[str, str]) -> bool:
    """Return whether a frame belongs to a function, given as (end of its file's path, name)."""
    path, name = function
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(path)


def is_library(filename: str) -> bool:
    """Return whether this file's code is a library's or made at run time, rather than the person's own."""
    # '<frozen importlib._bootstrap>' and '<string>' are not files of anybody's.
    made_at_run_time = filename.startswith("<") and not filename.startswith("<ipython")
    return made_at_run_time or filename.startswith(_LIBRARIES)


def is_ours(filename: str) -> bool:
    """Return whether this file's code is nbgpu's."""
    return filename.startswith(_PACKAGE)


def num_left_out_in_words(count: int) -> str:
    """Return a text such as '3 frames of libraries left out'."""
    return f"{count} frame{'s' if count > 1 else ''} of libraries left out"


def error_as_text(error: BaseException) -> str:
    """Return the error as Python prints it, but with only the person's own lines if its traceback has any.

    Frames of libraries between and below them are counted. Causes are shortened in the same way.
    """
    formatted = traceback.TracebackException(type(error), error, error.__traceback__, lookup_lines=False)
    num_left_out = _shorten(formatted)
    lines = list(formatted.format())
    if num_left_out and not formatted.exceptions:  # below the message of a group come its errors
        num_of_message = len(list(formatted.format_exception_only()))
        lines.insert(len(lines) - num_of_message, f"  ({num_left_out_in_words(num_left_out)})\n")
    return "".join(lines)


def _shorten(formatted: traceback.TracebackException) -> int:
    """Keep only the person's lines of a formatted error, of its causes and of the errors of a group; a stack
    without such lines stays whole. Return the number of frames left out of the error itself, without those
    above the person's first line, which only lead to it."""
    for part in (formatted.__cause__, formatted.__context__, *(formatted.exceptions or ())):
        if part is not None:
            _shorten(part)
    own = [index for index, line in enumerate(formatted.stack) if not is_library(line.filename)]
    if not own:
        return 0
    num_left_out = len(formatted.stack) - own[0] - len(own)
    formatted.stack[:] = [formatted.stack[index] for index in own]
    return num_left_out


def own_part(traceback: TracebackType | None) -> tuple[TracebackType | None, int]:
    """Return (the traceback with only the frames of the person's code, the number of frames left out between
    and below).

    A traceback without such a frame comes back whole.
    """
    frames = _frames(traceback)
    own = [index for index, frame in enumerate(frames) if not is_library(frame.tb_frame.f_code.co_filename)]
    if not own:
        return (frames[0] if frames else None), 0
    kept: TracebackType | None = None
    # A new chain from the end: cutting the original would take the frames from a debugger too.
    for index in reversed(own):
        kept = TracebackType(kept, frames[index].tb_frame, frames[index].tb_lasti, frames[index].tb_lineno)
    return kept, len(frames) - own[0] - len(own)


def part_of_nbgpu(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback with only nbgpu's frames; None if it has none."""
    kept: TracebackType | None = None
    for frame in reversed(_frames(traceback)):
        if is_ours(frame.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def called_collective(codes: Iterable[CodeType]) -> str:
    """Return the function of torch.distributed that was called; empty for none. `codes` begins with the
    caller.

    The first public one counts: `all_gather_object` calls `all_gather`.
    """
    for code in codes:
        if code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_"):
            return code.co_name
    return ""


def empty_library_frames(traceback: TracebackType | None) -> None:
    """Clear the variables of the libraries' frames.

    IPython's frames keep the whole traceback after the failure, and with it a tensor that a function was
    called with.
    """
    for frame, _ in walk_tb(traceback):
        if is_library(frame.f_code.co_filename):
            clear(frame)


def clear(frame: FrameType) -> bool:
    """Clear the variables of a frame; return False for one that is still running, as those above a cell
    are."""
    with warnings.catch_warnings():
        # Python warns of a coroutine that was never awaited as it is lost here, and would name this line.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            frame.clear()
        except RuntimeError:
            return False
    return True


def codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    """Yield the code of each frame of a traceback, from the caller inwards."""
    return (frame.f_code for frame, _ in walk_tb(traceback))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and after it each one that led to the one before, as its cause or its context."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    """Return the traceback's parts, from the caller inwards."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames
