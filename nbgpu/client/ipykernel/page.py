"""The abilities of the page in front of the kernel, and a way for its messages while a cell is running."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ipykernel.iostream import OutStream
from IPython.core.getipython import get_ipython

from nbgpu.client.ipykernel.busy import stay_busy

if TYPE_CHECKING:
    import ipywidgets

FRONTEND_VARIABLE = "NBGPU_FRONTEND"
"""Environment variable: 1 or 0 overrules `has_frontend`."""


def _kernel() -> Any | None:
    return getattr(get_ipython(), "kernel", None)


def has_frontend() -> bool:
    """Return whether a page that can show widgets sent the cell that is running.

    A kernel cannot ask: a question to a page that is not there would never be answered. But every request to
    run a cell says whether somebody is there to answer `input()`. nbclient, and papermill and nbconvert on
    top of it, say no; JupyterLab, Notebook, VS Code and Colab say yes. Voilà runs notebooks through nbclient
    and shows them in a page all the same; it names itself in the kernel's environment. A console says yes
    although it shows no widgets: it prints the text that comes along with them.
    """
    asked_for = os.environ.get(FRONTEND_VARIABLE)
    if asked_for is not None:
        return asked_for not in ("", "0")
    kernel = _kernel()
    if kernel is None:
        return False
    if os.environ.get("SERVER_SOFTWARE", "").startswith("voila/"):
        return True
    request = kernel.get_parent("shell")
    return bool(request.get("content", {}).get("allow_stdin", False))


def is_captured() -> bool:
    """Return whether printed text goes elsewhere than to the page, as below `%%capture` and in
    `redirect_stdout`."""
    return not isinstance(sys.stdout, OutStream)


def has_subshells() -> bool:
    """Return whether the kernel can take a page's messages while a cell is running (ipykernel 7.1 and
    later)."""
    kernel = _kernel()
    return bool(getattr(kernel, "_supports_kernel_subshells", False))


def answer_while_busy(widget: ipywidgets.Widget) -> None:
    """Let the page's messages to `widget` reach it while a cell is running.

    JupyterLab sends a widget's messages to a subshell, a thread of the kernel that is free while the main
    thread runs a cell. ipykernel then sends them back to the thread in which the widget last spoke, which is
    the main thread: the message would wait for the cell's end. The method that decides this is private to
    ipykernel, so it is only replaced where it exists; a test fails when that no longer has the effect.
    Answers that come while a cell is running do not make the kernel look idle.
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
        stay_busy(_kernel())
