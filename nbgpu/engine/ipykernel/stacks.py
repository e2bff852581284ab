"""Reports what this rank's main thread is doing, without the main thread's help.

A thread reads the main thread's Python frames and replies on a socket in the cluster's private folder. This
thread needs the GIL, which a collective releases while it waits. A rank that does not reply is in C code that
holds the GIL.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch.distributed as dist

from nbgpu.engine.frames import RUNS_A_CALL, RUNS_A_CELL, called_collective, is_function, is_library, is_ours
from nbgpu.engine.group import activity, ddp_objects, simulated_link, sockets, torch_private
from nbgpu.engine.ipykernel import awaiting, interrupts
from nbgpu.machine.signals import c_signal
from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import MainThreadState

_log = logging.getLogger("nbgpu.engine")

_RUNS_A_LOOP = "nbgpu/engine/training/loop.py", "run"
_DDP = "torch/nn/parallel/distributed.py"
_HOLDS_BACK = "nbgpu/engine/group/simulated_queue.py"
"""The module in which a rank waits for a collective that a simulated link holds back."""
_MAX_SOURCE_CHARS = 80

STACK_SIGNAL = signal.SIGUSR2

_stack_file: TextIO | None = None


def start_answering(folder: Path) -> None:
    """Start the thread that replies to every process that may enter the folder. Call on the main thread.

    STACK_SIGNAL writes the main thread's stack into a file there, which works even while C code holds the
    GIL. The signal may cut a sleep in that code short, so it is only sent to ranks that are interrupted
    anyway.
    """
    global _stack_file  # it stays open
    _stack_file = (folder / MainThreadState.stack_name(os.getpid())).open("w")
    restore_signal()
    listener = socket.socket(socket.AF_UNIX)
    with short_path(folder) as short:
        listener.bind(str(short / MainThreadState.socket_name(os.getpid())))
    listener.listen()
    os.register_at_fork(after_in_child=lambda: _release_in_child(listener))
    threading.Thread(target=_answer, args=(listener,), name="nbgpu-stacks", daemon=True).start()


def is_signal_replaced() -> bool:
    """Return whether other code has set a handler for STACK_SIGNAL through Python. A handler that was set in
    C cannot be detected."""
    return c_signal.getsignal(STACK_SIGNAL) is not _ignore


def restore_signal() -> None:
    """Make STACK_SIGNAL write the stack again, whatever other code did with the signal.

    Call on the main thread.
    """
    c_signal.pthread_sigmask(signal.SIG_UNBLOCK, (STACK_SIGNAL,))
    if is_signal_replaced():
        # faulthandler does not notice that another handler replaced its own, until its own is unregistered.
        # It then restores the handler set here, so that the signal ends the process at no moment.
        c_signal.signal(STACK_SIGNAL, _ignore)
        faulthandler.unregister(STACK_SIGNAL)
    assert _stack_file is not None, "the rank does not answer yet"
    faulthandler.register(STACK_SIGNAL, _stack_file, all_threads=False)


def _ignore(*_: Any) -> None:
    pass


def _release_in_child(listener: socket.socket) -> None:
    """Release the socket and the signal in a child that code on the rank has forked: the child has no thread
    that replies."""
    listener.close()
    if not is_signal_replaced():
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, signal.SIG_DFL)


def _answer(listener: socket.socket) -> None:
    """Answer each connection with the main thread's state as JSON, for as long as the process lives."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                where = replace(find(), unheeded=interrupts.unheeded())
                answer = json.dumps(asdict(where)).encode()
            except Exception:  # noqa: BLE001 - it is logged
                # The thread runs on while its frames are read; one failed reading must not end this loop.
                _log.exception("the position of the main thread could not be read")
                continue
            with suppress(OSError):  # the client may be gone
                connection.sendall(answer)


def find() -> MainThreadState:
    """Return what the main thread is doing now. Call on any thread."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    frames: list[FrameType] = []
    frame = sys._current_frames().get(main_thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()  # the outermost first
    # A collective that a simulated link holds back waits in Python: leave these frames out, as if it waited
    # in C++.
    frames = list(takewhile(lambda frame: not frame.f_code.co_filename.endswith(_HOLDS_BACK), frames))
    if _first_below(frames, RUNS_A_CELL) is None and (awaited := awaiting.frames()):
        # The event loop is in no cell, but a cell is suspended at an `await`.
        frames = awaited
    if (first := _first_below(frames, RUNS_A_CELL)) is not None:
        return _with_link(_in_person_code("cell", frames[first:], main_thread))
    if (first := _first_below(frames, RUNS_A_CALL)) is None:
        return MainThreadState("idle")
    # A call of the client: a training run, or other code.
    if (in_loop := _first_below(frames, _RUNS_A_LOOP)) is not None:
        where = _in_run(frames[in_loop - 1 :], main_thread)
    else:
        where = _in_person_code("call", frames[first:], main_thread)
    return _with_link(_with_activity(where, main_thread))


def _with_link(where: MainThreadState) -> MainThreadState:
    """Add the simulated link to the name of a collective, because the rank may wait for the link and not for
    other ranks."""
    link = simulated_link.in_words()
    if not link or not where.collective:
        return where
    return replace(where, collective=f"{where.collective} over the {link}")


def _with_activity(where: MainThreadState, main_thread: int) -> MainThreadState:
    """Add a description of the work that this rank does alone, and the main thread's CPU time to the pulse,
    which then changes while the rank computes."""
    busy_with = activity.current()
    if not busy_with:
        return where
    return replace(where, busy_with=busy_with, pulse=f"{where.pulse} {_cpu_s(main_thread):.1f}")


def _first_below(frames: Sequence[FrameType], caller: tuple[str, str]) -> int | None:
    """Return the index of the first frame that the function `caller` has called, directly below its own; None
    if it is not among the frames.

    Args:
        frames: the frames, the outermost first.
        caller: the function, as in `engine/frames.py`.
    """
    for index, frame in enumerate(frames[:-1]):
        if is_function(frame, caller):
            return index + 1
    return None


def _in_person_code(doing: Any, frames: Sequence[FrameType], main_thread: int) -> MainThreadState:
    """Return the state in a cell or a call of the client.

    Args:
        doing: 'cell' or 'call'.
        frames: the main thread's frames from the person's first one on, the outermost first.
        main_thread: the main thread's identifier.

    Returns:
        The line of the cell, the source line of the innermost frame of the person's code, and the collective
        in which it waits, if any.
    """
    persons = [index for index, frame in enumerate(frames) if not is_library(frame.f_code.co_filename)]
    if not persons:  # such as a call of a library's function, or a run that begins
        return MainThreadState(doing, collective=_collective(frames), pulse=_pulse("", main_thread))
    cell_file = frames[persons[0]].f_code.co_filename
    in_cell = [index for index in persons if frames[index].f_code.co_filename == cell_file]
    innermost = frames[persons[-1]]
    elsewhere = doing == "call" or persons[-1] != in_cell[-1]
    collective = _collective(frames[persons[-1] :])
    return MainThreadState(
        doing,
        line=(frames[in_cell[-1]].f_lineno or 0) if doing == "cell" else 0,
        source=_source(innermost),
        within=_described(innermost) if elsewhere else "",
        collective=collective,
        pulse=_pulse(collective, main_thread),
    )


def _in_run(frames: Sequence[FrameType], main_thread: int) -> MainThreadState:
    """Return the state in a training run; `frames` begins with the frame of the training loop."""
    paths = [frame.f_code.co_filename for frame in frames]
    # The innermost frame of nbgpu's or the person's code: libraries' frames below it say little.
    last = max(i for i, path in enumerate(paths) if is_ours(path) or not is_library(path))
    innermost = frames[last]
    collective = _collective(frames[last:])
    return MainThreadState(
        "run",
        source=_source(innermost),
        within=_described(innermost),
        collective=collective,
        step=frames[0].f_locals["self"].step,
        pulse=_pulse(collective, main_thread),
    )


def _described(frame: FrameType) -> str:
    """Return 'fit, model.py line 30', or for a function of an earlier cell 'fit, line 3 of an earlier
    cell'."""
    path = Path(frame.f_code.co_filename)
    # A rank's IPython compiles cells under the second kind of name, the notebook's under the first.
    is_cell = path.parent.name.startswith("ipykernel_") or path.name.startswith("<ipython")
    where = f"line {frame.f_lineno} of an earlier cell" if is_cell else f"{path.name} line {frame.f_lineno}"
    return f"{frame.f_code.co_name}, {where}"


def _source(frame: FrameType) -> str:
    """Return the source line at which a frame is, shortened to `_MAX_SOURCE_CHARS`."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_globals).strip()
    return text if len(text) <= _MAX_SOURCE_CHARS else f"{text[: _MAX_SOURCE_CHARS - 3]}..."


def _collective(frames: Sequence[FrameType]) -> str:
    """Return the collective that the frames are in; the first frame is the person's innermost, or the
    trainer's."""
    below = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames[1:]]
    if not below:
        return _awaited_work(frames[0])
    last_path, last_name = below[-1]
    # Autograd calls DDP's reducer from C++, which leaves no frame of DDP on the stack.
    if last_name == "_engine_run_backward" and ddp_objects.are_there():
        return "DDP backward"
    if "/torch/distributed/" not in last_path and not last_path.endswith(_DDP):
        return ""
    ddp_methods = [name for path, name in below if path.endswith(_DDP)]
    if ddp_methods:
        return "DDP constructor" if "__init__" in ddp_methods else "DDP forward"
    called = called_collective(frame.f_code for frame in frames[1:])
    return called or ("FSDP" if "/fsdp/" in last_path else "torch.distributed")


def _awaited_work(frame: FrameType) -> str:
    """Return 'work.wait()' if the frame is in that call and `work` comes from an asynchronous collective."""
    # The source positions of the instruction that is being executed; each takes two bytes of bytecode.
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions or positions[0] != positions[1]:
        return ""
    line, _, start, end = positions
    text = linecache.getline(frame.f_code.co_filename, line or 0, frame.f_globals)
    # Columns count bytes.
    called = re.match(r"([\w.]+)\.wait\(", text.encode()[start:end].decode(errors="replace"))
    if called is None:
        return ""
    first, *attributes = called[1].split(".")
    awaited = frame.f_locals.get(first, frame.f_globals.get(first))
    # Looked up in `__dict__`, because a property of the person's object could run any code on this thread.
    for attribute in attributes:
        awaited = getattr(awaited, "__dict__", {}).get(attribute)
    return f"{called[1]}.wait()" if isinstance(awaited, dist.Work) else ""


def _pulse(collective: str, main_thread: int) -> str:
    """Return a text that changes with every collective that begins and every byte that arrives: as long as it
    stays the same, the rank stands still."""
    num_begun = sum(torch_private.num_collectives(group) for group in torch_private.living_groups())
    pulse = f"{num_begun} {sockets.moved_bytes()}"
    if collective == "DDP backward":
        # One function computes gradients and waits for them; only computing takes CPU time.
        pulse += f" {_cpu_s(main_thread):.0f}"
    return pulse


def _cpu_s(thread: int) -> float:
    """Return the CPU time of a thread in seconds."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
