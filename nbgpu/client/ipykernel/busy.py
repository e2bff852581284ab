"""Keeps a kernel 'busy' for its pages while it runs a cell, whatever its other threads answer meanwhile.

ipykernel answers the widgets' messages on threads of their own ("subshells") while the main thread runs a
cell, and says 'busy' and 'idle' around each. Pages and the server know one state of a kernel, the last one
that it said: JupyterLab's status bar would read "Idle" next to a cell that runs, and a server that ends idle
kernels would end this one. Here 'busy' is said again after such an 'idle'.
"""

from __future__ import annotations

import threading
from typing import Any

_PUBLISH = "_publish_status"
"""The method with which ipykernel says its state. It is private, from 6.29 to 7.4: where it does not exist,
the state is left as it is, and a test fails."""


def stay_busy(kernel: Any) -> None:
    """Keep the state of a kernel true from now on; calling this again changes nothing."""
    publish = getattr(kernel, _PUBLISH, None)
    if publish is None or _PUBLISH in vars(kernel):
        return
    runs_cell = bool(kernel.get_parent("shell"))
    # Without the lock a cell could end between the look at `runs_cell` and the 'busy' that follows from it.
    lock = threading.Lock()

    def publish_and_stay_busy(status: str, *args: Any, **kwargs: Any) -> None:
        nonlocal runs_cell
        with lock:
            publish(status, *args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                runs_cell = status == "busy"
            elif status == "idle" and runs_cell:
                # It carries the same request: who passes over the 'idle' of such requests passes over this.
                publish("busy", *args, **kwargs)

    setattr(kernel, _PUBLISH, publish_and_stay_busy)
