"""The handler of SIGINT, which interrupts the person's code and no other code of the engine.

ipykernel lets SIGINT raise KeyboardInterrupt anywhere between the arrival of a request and its reply. A
SIGINT before the first or after the last line of the cell then ends the request without a reply, and the
client waits for ever. The client interrupts again until the rank has replied, so that an interrupt can be
ignored here.

A signal handler that a cell sets lasts until the end of the cell; otherwise the next cell could not be
stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import FrameType

from nbgpu.engine.frames import (
    IMPORTS_A_MODULE,
    RUNS_A_CALL,
    RUNS_A_CELL,
    RUNS_A_TASK,
    TAKES_A_REQUEST,
    is_function,
    is_library,
)
from nbgpu.engine.group import collective_timeout, sockets
from nbgpu.engine.ipykernel import awaiting
from nbgpu.machine.signals import c_signal
from nbgpu.protocol.records import Unheeded


def install() -> None:
    """Let interrupts end the children that code on the rank forks. The rank's own handler of SIGINT is set
    before each request."""
    os.register_at_fork(after_in_child=_restore_in_child)


def restore_handler() -> None:
    """Install the handler of SIGINT before a request. Call on the main thread.

    The handler is set each time, because one that was set in C since then, as by faulthandler, cannot be
    detected.
    """
    global _unheeded
    _unheeded = ""
    c_signal.signal(signal.SIGINT, _interrupt)
    c_signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def is_handler_replaced() -> bool:
    """Return whether the person's code has replaced the handler of SIGINT in this request, or blocked
    SIGINT."""
    return c_signal.getsignal(signal.SIGINT) is not _interrupt or signal.SIGINT in c_signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    )


def _restore_in_child() -> None:
    """Let an interrupt raise anywhere in a child that code on the rank has forked, as in an ordinary
    process."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def unheeded() -> Unheeded:
    """Return the reason why interrupts do not end the main thread's work; empty if no reason is known. Call
    on any thread."""
    # Another thread has its own signal mask, so that only the handler is looked at.
    if c_signal.getsignal(signal.SIGINT) is not _interrupt:
        return "replaced"
    return "caught" if awaiting.was_interrupted() else _unheeded


_unheeded: Unheeded = ""
"""The fate of the last interrupt in this request, if the request did not end with it."""
_interrupted = False
"""Whether an interrupt has cut something off since the last request."""


def finish_request() -> None:
    """Clean up after a request: a cell, or a call of the client such as the search for a batch size."""
    global _interrupted
    if _interrupted:
        _interrupted = False
        forget_half_imported()


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise an error if the main thread is in the person's code, cancel a cell that is
    suspended at an `await`, and do nothing elsewhere.

    The function walks from the innermost frame outwards until it finds the function that runs the person's
    code. Each interrupt that has no effect is repeated by the client.
    """
    global _interrupted, _unheeded
    if _is_in_import_of_torch(frame):
        _unheeded = "importing"
        return
    if sockets.is_group_in_the_making():
        # The other ranks would wait for the connections of this one. After a failure this rank is freed from
        # the forming like they are, and the client repeats the interrupt.
        return
    # Set before the error is raised: if the person's code catches it, 'caught' is the reason why it goes on.
    before, _interrupted, _unheeded = _unheeded, True, "caught"
    in_persons_code = False
    while frame is not None and frame.f_back is not None:
        in_persons_code = in_persons_code or not is_library(frame.f_code.co_filename)
        # A call of the client: ipyparallel runs its source as '<string>'.
        if is_function(frame.f_back, RUNS_A_CALL) and frame.f_code.co_filename == "<string>":
            raise _interruption()
        # IPython's own functions are called from there too.
        if is_function(frame.f_back, RUNS_A_CELL) and not is_library(frame.f_code.co_filename):
            raise _interruption()
        # Outside of the person's code, such as before the cell's first line, where an error would cost the
        # reply.
        if is_function(frame.f_back, TAKES_A_REQUEST):
            break
        if is_function(frame.f_back, RUNS_A_TASK) and in_persons_code:
            # This is a task that a cell has started. KeyboardInterrupt would end the event loop, and with it
            # the engine.
            raise asyncio.CancelledError
        frame = frame.f_back
    _unheeded = before
    awaiting.interrupt()


def _interruption() -> BaseException:
    """Return the error to raise in the person's code: KeyboardInterrupt, or the error about a late collective
    if its watchdog has sent the interrupt."""
    return collective_timeout.take_error() or KeyboardInterrupt()


def _is_in_import_of_torch(frame: FrameType | None) -> bool:
    """Return whether torch is being imported, which must not be interrupted.

    Parts of torch register themselves in other parts when they are imported, and refuse to do so twice. After
    an interrupted import torch._dynamo, which DDP and all optimizers need, would be unusable for the rest of
    the process. The client interrupts again later.
    """
    while frame is not None:
        if is_function(frame, IMPORTS_A_MODULE):
            name: str = frame.f_locals["spec"].name
            if name.partition(".")[0] == "torch":
                return True
        frame = frame.f_back
    return False


def forget_half_imported() -> None:
    """Remove the modules of packages whose import was interrupted.

    Python removes only the package itself. The next import of the package finds its modules in `sys.modules`
    and does not make them attributes of the package: "module 'sympy' has no attribute 'core'", for the rest
    of the process.
    """
    for name in sorted(sys.modules):  # a package before its modules
        package = name.rpartition(".")[0]
        if package and package not in sys.modules:
            del sys.modules[name]
