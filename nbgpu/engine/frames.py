"""Whose code a Python frame runs: the person's, a library's, or what called the person's."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import FrameType

_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).resolve().parents[1]),
)

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


def is_function(frame: FrameType, function: tuple[str, str]) -> bool:
    """Whether a frame is one of the function (end of its file's path, name)."""
    path, name = function
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(path)


def is_library(filename: str) -> bool:
    """Whether code of this file is a library's, or made at run time, and not the person's own."""
    # '<frozen importlib._bootstrap>', '<string>': made at run time, and no one's file.
    made_at_run_time = filename.startswith("<") and not filename.startswith("<ipython")
    return made_at_run_time or filename.startswith(_LIBRARIES)
