"""The IPython shell that this process has, if it is a notebook's kernel or IPython in a terminal."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any


def current() -> Any | None:
    """Return the shell, or None in a script. This does not import IPython."""
    getipython = sys.modules.get("IPython.core.getipython")
    return None if getipython is None else getipython.get_ipython()


def event_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop on which the kernel runs its cells, on any thread. Outside of a kernel, return
    the running loop of the calling thread, or None if there is none."""
    io_loop = getattr(getattr(current(), "kernel", None), "io_loop", None)
    if io_loop is not None:
        loop: asyncio.AbstractEventLoop = io_loop.asyncio_loop
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def is_on_colab() -> bool:
    """Whether this is a kernel of Colab, which imports Colab's package before any cell."""
    return "google.colab" in sys.modules


def allow_widgets() -> None:
    """Allow Colab's page to load widgets that are not built in, such as the panels; do nothing elsewhere."""
    if is_on_colab():
        import_module("google.colab.output").enable_custom_widget_manager()
