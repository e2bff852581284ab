"""Tracebacks of cells that end where the person's own code ends.

IPython reads and parses every source file of a traceback. In torch's these are tens of thousands of lines, and
a rank that failed in a collective would take seconds to say so while all others wait for it. What the person
can change is in their own lines anyway; the message below them is the library's.
"""

from __future__ import annotations

import signal
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, TracebackType
from typing import Any

from nbgpu.engine.frames import is_library

_COLLECTIVES = "torch/distributed/distributed_c10d.py"


def own_part(traceback: TracebackType | None) -> tuple[TracebackType | None, int]:
    """(the traceback from the first to the last frame of the person's code, frames left out below it).

    With no frame of theirs the whole traceback comes back.
    """
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    own = [index for index, frame in enumerate(frames) if not is_library(frame.tb_frame.f_code.co_filename)]
    if not own:
        return (frames[0] if frames else None), 0
    kept: TracebackType | None = None
    # Built anew from the end: cutting the original would take the frames from a debugger too.
    for frame in reversed(frames[own[0] : own[-1] + 1]):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept, len(frames) - 1 - own[-1]


def called_collective(codes: Iterable[CodeType]) -> str:
    """The function of torch.distributed that was called, of the code from the caller inwards; empty for none.

    The first that is public: `all_gather_object` calls `all_gather`.
    """
    for code in codes:
        if code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_"):
            return code.co_name
    return ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores interrupts while a failure is put into words: the client interrupts again until the rank is back, and
    that would only spoil the answer. For the main thread."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def install(shell: Any) -> None:
    """Makes the engine's shell show tracebacks that way."""
    shell.set_custom_exc((Exception, KeyboardInterrupt, CancelledError), _show)


def _show(
    shell: Any, kind: type[BaseException], error: BaseException, traceback: Any, tb_offset: Any = None
) -> Any:
    with undisturbed():
        return _shown(shell, kind, error, traceback)


def _shown(
    shell: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType
) -> list[str]:
    own, num_left_out = own_part(traceback)
    collective = called_collective(_codes(traceback))
    empty_library_frames(traceback)
    # IPython formats the error a second time, for its history.
    error.__traceback__ = own
    cause = error.__cause__ or error.__context__
    while cause is not None:
        empty_library_frames(cause.__traceback__)
        cause.__traceback__, _ = own_part(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    lines: list[str] = shell.InteractiveTB.structured_traceback(kind, error, own, tb_offset=0)
    if num_left_out:
        where = f"in {collective} of torch.distributed: " if collective else ""
        lines.insert(-1, f"    ({where}{num_left_out} more frames, of the libraries that this line calls)\n")
    shell._showtraceback(kind, error, lines)
    return lines


def empty_library_frames(traceback: TracebackType | None) -> None:
    """Takes from the libraries' frames what they hold: the whole traceback outlives the failure in IPython's frames,
    and a tensor that a function was called with would live as long."""
    while traceback is not None:
        if is_library(traceback.tb_frame.f_code.co_filename):
            # Those above the cell are still at work, and stay as they are.
            with suppress(RuntimeError):
                traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next
