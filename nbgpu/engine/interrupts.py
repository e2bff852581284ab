"""SIGINT reaches what the person runs, and nothing else of the engine.

ipykernel lets it raise KeyboardInterrupt anywhere between the arrival of a request and its answer. One that comes
before the first or after the last line of the cell then ends the request with no answer at all, and the client
waits for it for ever. The client interrupts again until a rank is back, so one that is ignored is not missed.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from nbgpu.engine import tracebacks

RUNS_A_CELL = ("IPython/core/interactiveshell.py", "run_code")
"""The function that runs a cell's code: the end of its file's path, and its name."""
RUNS_A_CALL = ("ipyparallel/engine/kernel.py", "do_apply")
"""The one that runs what `Cluster.apply` sent."""


def reach_only_the_persons_code(kernel: Any) -> None:
    """From now on. Called on the main thread.

    Args:
        kernel: the engine's, whose own handler is set around every request.
    """
    kernel.pre_handler_hook = kernel.post_handler_hook = lambda: None
    signal.signal(signal.SIGINT, _interrupt)


def is_function(frame: FrameType, function: tuple[str, str]) -> bool:
    """Whether a frame is one of the function (end of its file's path, name)."""
    path, name = function
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(path)


def _interrupt(_: int, frame: FrameType | None) -> None:
    while frame is not None and frame.f_back is not None:
        if is_function(frame.f_back, RUNS_A_CALL) and frame.f_code.co_filename == "<string>":
            raise KeyboardInterrupt
        # IPython calls functions of its own there too.
        if is_function(frame.f_back, RUNS_A_CELL) and not tracebacks.is_library(frame.f_code.co_filename):
            raise KeyboardInterrupt
        frame = frame.f_back
