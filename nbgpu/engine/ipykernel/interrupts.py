"""SIGINT reaches what the person runs, and nothing else of the engine.

ipykernel lets it raise KeyboardInterrupt anywhere between the arrival of a request and its answer. One that comes
before the first or after the last line of the cell then ends the request with no answer at all, and the client
waits for it for ever. The client interrupts again until a rank is back, so one that is ignored is not missed.

What a cell does with the handlers of signals lasts as long as the cell: the next one could not be stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

from nbgpu.engine.frames import (
    IMPORTS_A_MODULE,
    RUNS_A_CALL,
    RUNS_A_CELL,
    RUNS_A_TASK,
    TAKES_A_REQUEST,
    is_function,
    is_library,
)
from nbgpu.engine.ipykernel import awaiting
from nbgpu.protocol.records import Unheeded

# The functions of `signal` make an Enum of each handler and number, which takes ten times as long as they themselves.
_signal = import_module("_signal")


def reach_only_the_persons_code(kernel: Any) -> None:
    """Install the handler of SIGINT. Call on the main thread.

    Args:
        kernel: the engine's, whose own handler is set around every request.
    """
    kernel.post_handler_hook = _tidy_up
    take_back()
    os.register_at_fork(after_in_child=_leave)


def take_back() -> None:
    """Install the handler of SIGINT before a request. Call on the main thread.

    A handler that was set in C, as faulthandler does, does not show, so it is set each time.
    """
    global _unheeded
    _unheeded = ""
    _signal.signal(signal.SIGINT, _interrupt)
    _signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def is_taken() -> bool:
    """Whether the person's code has replaced the handler of SIGINT in this request, or blocked SIGINT."""
    return _signal.getsignal(signal.SIGINT) is not _interrupt or signal.SIGINT in _signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    )


def _leave() -> None:
    """Let an interrupt raise anywhere in a child that code on the rank has forked, as in any process."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def unheeded() -> Unheeded:
    """Why interrupts do not end what the main thread runs, as far as that can be known. Call on any thread."""
    # Another thread has a mask of its own, and is asked about the handler alone.
    if _signal.getsignal(signal.SIGINT) is not _interrupt:
        return "replaced"
    return "caught" if awaiting.was_interrupted() else _unheeded


_unheeded: Unheeded = ""
"""What became of the last interrupt in this request, where the request did not end with it."""
_interrupted = False
"""Since the last request an interrupt has cut something off."""


def _tidy_up() -> None:
    """Runs after every request: a cell, and a call of the client such as the search for a batch size."""
    global _interrupted
    if _interrupted:
        _interrupted = False
        forget_half_imported()


def _interrupt(_: int, frame: FrameType | None) -> None:
    global _interrupted, _unheeded
    if _is_in_import_of_torch(frame):
        _unheeded = "importing"
        return
    before, _interrupted, _unheeded = _unheeded, True, "caught"
    in_persons_code = False
    while frame is not None and frame.f_back is not None:
        in_persons_code = in_persons_code or not is_library(frame.f_code.co_filename)
        if is_function(frame.f_back, RUNS_A_CALL) and frame.f_code.co_filename == "<string>":
            raise KeyboardInterrupt
        # IPython calls functions of its own there too.
        if is_function(frame.f_back, RUNS_A_CELL) and not is_library(frame.f_code.co_filename):
            raise KeyboardInterrupt
        if is_function(frame.f_back, TAKES_A_REQUEST):
            break
        if is_function(frame.f_back, RUNS_A_TASK) and in_persons_code:
            # A task that a cell has started. A KeyboardInterrupt would end the event loop, and the engine.
            raise asyncio.CancelledError
        frame = frame.f_back
    _unheeded = before
    awaiting.interrupt()


def _is_in_import_of_torch(frame: FrameType | None) -> bool:
    """Parts of torch note in others that they were imported, and refuse a second time: cut off, torch._dynamo, which DDP and
    all optimizers need, is of no use as long as the process lives. The client interrupts again when it is over."""
    while frame is not None:
        if is_function(frame, IMPORTS_A_MODULE):
            name: str = frame.f_locals["spec"].name
            if name.partition(".")[0] == "torch":
                return True
        frame = frame.f_back
    return False


def forget_half_imported() -> None:
    """Takes away the modules whose package is not there, because an interrupt cut its import off.

    Python takes only the package itself away. Imported again, it finds its parts in place and never makes them its
    attributes: "module 'sympy' has no attribute 'core'", for as long as the process lives.
    """
    for name in sorted(sys.modules):  # a package before its parts
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            del sys.modules[name]
