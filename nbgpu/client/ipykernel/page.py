"""The abilities of the page in front of the kernel, and the messages that keep the page right while a cell
runs.

ipykernel answers the messages of widgets on other threads ("subshells") while the main thread runs a cell,
and publishes the states 'busy' and 'idle' around each answer. Pages and the server take the last state that
was published for that of the kernel: JupyterLab's status bar would read "Idle" next to a running cell, and a
server that ends idle kernels would end this one. This module publishes 'busy' again after such an 'idle'.

A page that is loaded asks the kernel for its information first, and JupyterLab does not look for widgets
before it has the answer, which ipykernel would send only after the running cell. This module passes such
requests to a subshell, so that the page finds the cell's widgets at once. There is a subshell as soon as any
page has shown a widget.
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
_INFO_REQUESTS = ("kernel_info_request", "comm_info_request")
_HEADER = 1
"""The index of the header among the parts of a message; the signature comes first."""
_PUBLISH = "_publish_status"
"""The method by which ipykernel (6.29 to 7.4) publishes its state. It is private: where it does not exist,
nothing is changed, and a test fails."""


def stay_busy(kernel: Any) -> None:
    """Let a kernel count as busy during every cell from now on; calling this again changes nothing."""
    publish = getattr(kernel, _PUBLISH, None)
    if publish is None or _PUBLISH in vars(kernel):
        return
    runs_cell = bool(kernel.get_parent("shell"))
    # Without the lock, a cell could end between the check of `runs_cell` and the 'busy' that follows.
    lock = threading.Lock()

    def publish_and_stay_busy(status: str, *args: Any, **kwargs: Any) -> None:
        """Publish a state, and 'busy' after it if it is the 'idle' of another thread during a cell."""
        nonlocal runs_cell
        with lock:
            publish(status, *args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                runs_cell = status == "busy"
            elif status == "idle" and runs_cell:
                # It has the same parent request, so that a client that ignores the 'idle' ignores it too.
                publish("busy", *args, **kwargs)

    setattr(kernel, _PUBLISH, publish_and_stay_busy)


def _kernel() -> Any | None:
    return getattr(get_ipython(), "kernel", None)


def has_frontend() -> bool:
    """Return whether the request that is running, for a cell or for a button's callback, comes from a page
    that can show widgets.

    The kernel cannot ask: without a page there would never be an answer. But every request to run a cell has
    a flag for whether the client can answer `input()`. It is false for nbclient, and so for papermill and
    nbconvert, and true for JupyterLab, Notebook, VS Code and Colab. Voilà runs notebooks by nbclient but
    shows them in a page; an environment variable of the kernel names it. A console sets the flag although it
    shows no widgets: it prints the plain text of their outputs.
    """
    override = os.environ.get(FRONTEND_VARIABLE)
    if override is not None:
        return override not in ("", "0")
    kernel = _kernel()
    if kernel is None:
        return False
    if os.environ.get("SERVER_SOFTWARE", "").startswith("voila/"):
        return True
    request = kernel.get_parent("shell")
    is_of_widget = request.get("header", {}).get("msg_type") == "comm_msg"
    return is_of_widget or bool(request.get("content", {}).get("allow_stdin", False))


def is_captured() -> bool:
    """Return whether printed text does not go to the page, as in a cell with `%%capture` or in
    `redirect_stdout`."""
    return not isinstance(sys.stdout, OutStream)


def has_subshells() -> bool:
    """Return whether the kernel can handle messages of a page while a cell is running (ipykernel 7.1 and
    later)."""
    return bool(getattr(_kernel(), "_supports_kernel_subshells", False))


def answer_while_busy(widget: ipywidgets.Widget) -> None:
    """Let the page's messages to `widget` reach it while a cell is running.

    JupyterLab sends a widget's messages to a subshell, a thread of the kernel that is free while the main
    thread runs a cell. ipykernel would pass them on to the thread from which the widget has last sent
    something: the main thread, where they would wait for the end of the cell. The method that decides this is
    private, so it is replaced only where it exists, and a test fails if that has no effect. The kernel still
    counts as busy after the answers (`stay_busy`).
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
        stay_busy(_kernel())


class RunningCell:
    """The cell that is running now. Pages that are loaded meanwhile get answers, until `over` is called.

    This needs private names of ipykernel 7.1 to 7.4. Where they do not exist, pages wait for the end of the
    cell, and a test fails.
    """

    def __init__(self) -> None:
        self._kernel: Any = _kernel()
        self._request = self._kernel.get_parent("shell") if self._kernel is not None else {}
        self.over: Callable[[], None] = self._answer_pages()

    def _answer_pages(self) -> Callable[[], None]:
        """Let a subshell answer the requests of pages for the kernel's information; all other messages go to
        ipykernel as before. Return the function that undoes this."""
        kernel = self._kernel
        stream = getattr(kernel, "shell_stream", None)
        dispatch = getattr(kernel, "shell_channel_thread_main", None)
        subshells: Any = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
        needed = ("list_subshell", "get_shell_channel_to_subshell_socket")
        if stream is None or dispatch is None or not all(hasattr(subshells, name) for name in needed):
            return lambda: None

        async def route(message: Any) -> None:
            """Send a request for information to the first subshell, if there is one, and any other message
            where ipykernel would send it."""
            # Only the header is decoded; the message is passed on unchanged.
            _, parts = kernel.session.feed_identities(message, copy=False)
            kind = kernel.session.unpack(parts[_HEADER].bytes).get("msg_type")
            if kind in _INFO_REQUESTS and (ids := subshells.list_subshell()):
                subshells.get_shell_channel_to_subshell_socket(ids[0]).send_multipart(message, copy=False)
            else:
                await dispatch(message)

        stream.on_recv(route, copy=False)
        return lambda: stream.on_recv(dispatch, copy=False)

    def say_busy(self) -> None:
        """Publish 'busy' with the cell's own request as parent, for a page that was loaded during the cell.

        Such a page has missed the cell's 'busy', and JupyterLab ignores states whose parent is a request for
        information (the setting `untracked_message_types` of its server).
        """
        if self._kernel is not None:
            self._kernel.session.send(
                self._kernel.iopub_socket, "status", {"execution_state": "busy"}, parent=self._request
            )
