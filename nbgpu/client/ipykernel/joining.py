"""Lets a page that is loaded while a cell runs find the cell's widgets at once, and not only after the cell's
end.

Before anything else a page asks the kernel for its information, and JupyterLab does not look for widgets
until it has the answer. ipykernel would answer only after the running cell. Here such requests go to one of
the threads ("subshells") on which ipykernel answers the widgets' messages meanwhile; there is one as soon as
a page has shown a widget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell

_QUESTIONS = ("kernel_info_request", "comm_info_request")
_HEADER = 1


class RunningCell:
    """The cell that is running now, as pages see it. Call `over` when the cell shows nothing more.

    The names in the kernel that this needs are private, from ipykernel 7.1 to 7.4. Where they do not exist,
    pages wait as they always do; a test fails when that happens.
    """

    def __init__(self) -> None:
        self._kernel: Any = getattr(ipython_shell.current(), "kernel", None)
        self._request = self._kernel.get_parent("shell") if self._kernel is not None else {}
        self.over: Callable[[], None] = self._answer_pages()

    def _answer_pages(self) -> Callable[[], None]:
        kernel = self._kernel
        stream = getattr(kernel, "shell_stream", None)
        dispatch = getattr(kernel, "shell_channel_thread_main", None)
        subshells: Any = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
        needed = ("list_subshell", "get_shell_channel_to_subshell_socket")
        if stream is None or dispatch is None or not all(hasattr(subshells, name) for name in needed):
            return lambda: None

        async def answer_or_dispatch(message: Any) -> None:
            _, parts = kernel.session.feed_identities(message, copy=False)
            kind = kernel.session.unpack(parts[_HEADER].bytes).get("msg_type")
            if kind in _QUESTIONS and (free := subshells.list_subshell()):
                subshells.get_shell_channel_to_subshell_socket(free[0]).send_multipart(message, copy=False)
            else:
                await dispatch(message)

        stream.on_recv(answer_or_dispatch, copy=False)
        return lambda: stream.on_recv(dispatch, copy=False)

    def say_busy(self) -> None:
        """Tell pages that the kernel is busy, because its answer to a page's request looks as if it were
        not."""
        if self._kernel is not None:
            self._kernel.session.send(
                self._kernel.iopub_socket, "status", {"execution_state": "busy"}, parent=self._request
            )
