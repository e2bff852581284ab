"""The abilities of the page in front of the kernel, and what it learns of the kernel while a cell runs.

ipykernel answers the widgets' messages on threads of their own ("subshells") while the main thread runs a
cell, and says 'busy' and 'idle' around each. Pages and the server know one state of a kernel, the last one
that it said: JupyterLab's status bar would read "Idle" next to a cell that runs, and a server that ends idle
kernels would end this one. Here 'busy' is said again after such an 'idle'.

Before anything else a page asks the kernel for its information, and JupyterLab does not look for widgets
until it has the answer. ipykernel would answer only after the running cell. Here such requests go to a
subshell, which there is as soon as a page has shown a widget, so that a page that is loaded while a cell runs
finds the cell's widgets at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ipykernel.iostream import OutStream
from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    import ipywidgets

FRONTEND_VARIABLE = "NBGPU_FRONTEND"
"""Environment variable: 1 or 0 overrules `has_frontend`."""
_QUESTIONS = ("kernel_info_request", "comm_info_request")
# The index of the header among the parts of a message, behind the signature.
_HEADER = 1
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
        """Publish a state, and 'busy' after it if it is the 'idle' of another thread during a cell."""
        nonlocal runs_cell
        with lock:
            publish(status, *args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                runs_cell = status == "busy"
            elif status == "idle" and runs_cell:
                # It carries the same request: who passes over the 'idle' of such requests passes over this.
                publish("busy", *args, **kwargs)

    setattr(kernel, _PUBLISH, publish_and_stay_busy)


def _kernel() -> Any | None:
    return getattr(get_ipython(), "kernel", None)


def has_frontend() -> bool:
    """Return whether what is running, a cell or the callback of a button, was asked for by a page that can
    show widgets.

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
    is_of_widget = request.get("header", {}).get("msg_type") == "comm_msg"
    return is_of_widget or bool(request.get("content", {}).get("allow_stdin", False))


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


class RunningCell:
    """The cell that is running now, as pages see it. Call `over` when the cell shows nothing more.

    The names in the kernel that this needs are private, from ipykernel 7.1 to 7.4. Where they do not exist,
    pages wait as they always do; a test fails when that happens.
    """

    def __init__(self) -> None:
        self._kernel: Any = _kernel()
        self._request = self._kernel.get_parent("shell") if self._kernel is not None else {}
        self.over: Callable[[], None] = self._answer_pages()

    def _answer_pages(self) -> Callable[[], None]:
        """Let a subshell answer pages' requests for the kernel's information while the main thread runs the
        cell; all other messages go to ipykernel as before. Return the function that undoes this."""
        kernel = self._kernel
        stream = getattr(kernel, "shell_stream", None)
        dispatch = getattr(kernel, "shell_channel_thread_main", None)
        subshells: Any = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
        needed = ("list_subshell", "get_shell_channel_to_subshell_socket")
        if stream is None or dispatch is None or not all(hasattr(subshells, name) for name in needed):
            return lambda: None

        async def route(message: Any) -> None:
            """Send a page's question to the first subshell, if there is one, and any other message where
            ipykernel would."""
            # Only the header is decoded here: the message itself goes on unchanged.
            _, parts = kernel.session.feed_identities(message, copy=False)
            kind = kernel.session.unpack(parts[_HEADER].bytes).get("msg_type")
            if kind in _QUESTIONS and (ids := subshells.list_subshell()):
                subshells.get_shell_channel_to_subshell_socket(ids[0]).send_multipart(message, copy=False)
            else:
                await dispatch(message)

        stream.on_recv(route, copy=False)
        return lambda: stream.on_recv(dispatch, copy=False)

    def say_busy(self) -> None:
        """Tell pages that the kernel is busy, because its answer to a page's request looks as if it were
        not."""
        if self._kernel is not None:
            self._kernel.session.send(
                self._kernel.iopub_socket, "status", {"execution_state": "busy"}, parent=self._request
            )
