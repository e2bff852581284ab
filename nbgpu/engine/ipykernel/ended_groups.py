"""The error message of a cell that uses a variable whose process group has ended, in place of torch's
message."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any
from weakref import ref

from nbgpu.engine.frames import is_library

_NO_SUCH_GROUP = (
    "is not initialized in the world group map",
    "Could not resolve the process group",
    "Invalid process group specified",
)
"""Parts of torch's error messages for a process group that has ended."""
_CUT = ("Socket closed", "Connection closed by peer")
"""Parts of gloo's error messages for a group that has ended, or that another rank has left."""

_SENTENCE = "this belonged to a process group that has ended; make it again"
_noted: dict[str, tuple[ref[Any], str]] = {}
"""The value of each variable whose group has ended, and the line that makes the variable again, by its
name."""


def note(name: str, value: Any, line: str) -> None:
    """Note a variable whose group has ended.

    Args:
        name: the variable's name.
        value: the variable's value.
        line: the line that makes the variable again.
    """
    _noted[name] = ref(value), line


def about(error: BaseException) -> str:
    """Return a message that names the variables whose process group has ended, in place of torch's message;
    empty if the error has another cause.

    gloo's messages may also mean that another rank has failed: they count only if the failed code uses such a
    variable.
    """
    if not isinstance(error, Exception):
        return ""
    is_certain = any(text in str(error) for text in _NO_SUCH_GROUP)
    if not is_certain and not any(text in str(error) for text in _CUT):
        return ""
    lines: dict[str, None] = {}
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
        if is_library(code.co_filename):
            continue
        # The names that the code of a frame uses: globals and attributes, local variables, and those of outer
        # functions.
        for name in (*code.co_names, *code.co_varnames, *code.co_freevars):
            reference, line = _noted.get(name, (lambda: None, ""))
            seen = frame.f_locals.get(name, frame.f_globals.get(name))
            if seen is not None and seen is reference():
                lines[line] = None
    if lines:
        return f"{_SENTENCE}: {'; '.join(lines)}"
    return _SENTENCE if is_certain else ""
