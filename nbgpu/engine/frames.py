"""Whose code a Python frame runs: the person's, a library's, or what called the person's."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, TracebackType

_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
# Each ends with a slash: a folder nbgpu_runs beside the package is no part of it.
_LIBRARIES = (*{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")}, _PACKAGE)

RUNS_A_CELL = ("IPython/core/interactiveshell.py", "run_code")
"""The function that runs a cell's code: the end of its file's path, and its name."""
RUNS_A_CALL = ("ipyparallel/engine/kernel.py", "do_apply")
"""The one that runs what `Cluster.apply` sent."""
RUNS_A_TASK = ("asyncio/events.py", "_run")
"""The one that takes a task of the event loop one step further, and that runs its callbacks."""
IMPORTS_A_MODULE = ("<frozen importlib._bootstrap>", "_load_unlocked")
"""The one that runs a module's code; `spec` is its variable."""
TAKES_A_REQUEST = ("ipykernel/kernelbase.py", "dispatch_shell")
"""The one in which the kernel answers a request."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


def is_function(frame: FrameType, function: tuple[str, str]) -> bool:
    """Whether a frame is one of the function (end of its file's path, name)."""
    path, name = function
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(path)


def is_library(filename: str) -> bool:
    """Whether code of this file is a library's, or made at run time, and not the person's own."""
    # '<frozen importlib._bootstrap>', '<string>': made at run time, and no one's file.
    made_at_run_time = filename.startswith("<") and not filename.startswith("<ipython")
    return made_at_run_time or filename.startswith(_LIBRARIES)


def is_ours(filename: str) -> bool:
    """Whether code of this file is nbgpu's."""
    return filename.startswith(_PACKAGE)


def num_left_out_in_words(count: int) -> str:
    """'3 frames of libraries left out'."""
    return f"{count} frame{'s' if count > 1 else ''} of libraries left out"


def error_as_text(error: BaseException) -> str:
    """The error as Python prints it, but with the person's own lines only where its traceback has any.

    Frames of libraries between and below them are counted. Causes are shortened in the same way.
    """
    told = traceback.TracebackException(type(error), error, error.__traceback__, lookup_lines=False)
    num_left_out = _shorten(told)
    lines = list(told.format())
    if num_left_out:
        num_of_message = len(list(told.format_exception_only()))
        lines.insert(len(lines) - num_of_message, f"  ({num_left_out_in_words(num_left_out)})\n")
    return "".join(lines)


def _shorten(told: traceback.TracebackException) -> int:
    """Leaves the person's lines, as `error_as_text` says, and returns how many frames were left out of the last part."""
    for cause in (told.__cause__, told.__context__):
        if cause is not None:
            _shorten(cause)
    own = [index for index, line in enumerate(told.stack) if not is_library(line.filename)]
    if not own:
        return 0
    num_left_out = len(told.stack) - own[0] - len(own)
    told.stack[:] = [told.stack[index] for index in own]
    return num_left_out


def own_part(traceback: TracebackType | None) -> tuple[TracebackType | None, int]:
    """(the traceback with the frames of the person's code only, frames left out between and below them).

    With no frame of theirs the whole traceback comes back, and none is left out.
    """
    frames = _frames(traceback)
    own = [index for index, frame in enumerate(frames) if not is_library(frame.tb_frame.f_code.co_filename)]
    if not own:
        return (frames[0] if frames else None), 0
    kept: TracebackType | None = None
    # Built anew from the end: cutting the original would take the frames from a debugger too.
    for index in reversed(own):
        kept = TracebackType(kept, frames[index].tb_frame, frames[index].tb_lasti, frames[index].tb_lineno)
    return kept, len(frames) - own[0] - len(own)


def part_of_nbgpu(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback with nbgpu's frames only; None where it has none."""
    kept: TracebackType | None = None
    for frame in reversed(_frames(traceback)):
        if is_ours(frame.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def called_collective(codes: Iterable[CodeType]) -> str:
    """The function of torch.distributed that was called, of the code from the caller inwards; empty for none.

    The first that is public: `all_gather_object` calls `all_gather`.
    """
    for code in codes:
        if code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_"):
            return code.co_name
    return ""


def empty_library_frames(traceback: TracebackType | None) -> None:
    """Takes from the libraries' frames what they hold: the whole traceback outlives the failure in IPython's frames,
    and a tensor that a function was called with would live as long."""
    while traceback is not None:
        if is_library(traceback.tb_frame.f_code.co_filename):
            # Those above the cell are still at work, and stay as they are.
            with suppress(RuntimeError):
                traceback.tb_frame.clear()
        traceback = traceback.tb_next


def codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    """The code that each frame of a traceback runs, from the caller inwards."""
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    """The traceback's parts, from the caller inwards."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames
