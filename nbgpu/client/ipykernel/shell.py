"""The IPython shell that this process has, if it is a notebook's kernel or IPython in a terminal."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any


def current() -> Any | None:
    """Return the shell, or None in a script; a script is not made to import IPython."""
    getipython = sys.modules.get("IPython.core.getipython")
    return None if getipython is None else getipython.get_ipython()


def event_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop on which a kernel runs its cells, whichever thread calls this. Outside of a
    kernel return the loop of the calling thread, or None if it has none."""
    io_loop = getattr(getattr(current(), "kernel", None), "io_loop", None)
    if io_loop is not None:
        loop: asyncio.AbstractEventLoop = io_loop.asyncio_loop
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def is_on_colab() -> bool:
    """Whether this is a kernel of Colab's, which loads its own package before any cell."""
    return "google.colab" in sys.modules


def allow_widgets() -> None:
    """Let Colab's page load widgets that it does not bring itself, such as the panels; nothing elsewhere."""
    if is_on_colab():
        import_module("google.colab.output").enable_custom_widget_manager()
