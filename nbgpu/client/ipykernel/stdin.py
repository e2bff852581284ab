"""Input boxes below a cell that do not block the kernel's thread until the answer."""

from __future__ import annotations

from typing import Any


def can_ask_without_waiting(kernel: Any) -> bool:
    """Return whether the kernel has the two private names that `Page` needs, as ipykernel 6.29 to 7.4 has."""
    return hasattr(kernel, "_input_request") and hasattr(kernel, "stdin_socket")


class Page:
    """Shows an input box below the cell, as `input()` in a kernel does, without waiting for the answer."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request_id = ""

    def ask(self, prompt: str, password: bool) -> None:
        """Show the input box and return at once. The kernel's `raw_input` and `getpass` would wait for the
        answer in `_input_request`, which `_send` replaces during the call."""
        # Drop answers to earlier questions, which nobody waits for any more.
        while self._receive() is not None:
            pass
        ask = self._kernel.getpass if password else self._kernel.raw_input
        self._kernel._input_request = self._send
        try:
            ask(prompt)
        finally:
            del self._kernel._input_request

    def _send(self, prompt: str, ident: Any, parent: Any, password: bool = False) -> str:
        """Send the question without waiting; this replaces a method that sends and waits."""
        content = {"prompt": prompt, "password": password}
        sent = self._kernel.session.send(
            self._kernel.stdin_socket, "input_request", content, parent, ident=ident
        )
        self._request_id = sent["header"]["msg_id"]
        return ""

    def answer(self) -> str | None:
        """Return the text that was typed in the newest box; None before the answer."""
        while (reply := self._receive()) is not None:
            # A page names the question that it answers; other clients may not.
            if reply["parent_header"].get("msg_id", self._request_id) == self._request_id:
                return str(reply["content"].get("value", ""))
        return None

    def _receive(self) -> Any:
        import zmq  # imported here, because a script never asks with a box

        _, reply = self._kernel.session.recv(self._kernel.stdin_socket, mode=zmq.NOBLOCK)
        return reply
