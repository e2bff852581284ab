"""Input boxes under a cell that do not hold up the kernel's thread while nobody types."""

from __future__ import annotations

from typing import Any


def can_ask_without_waiting(kernel: Any) -> bool:
    """Return whether this ipykernel has the two private names that a `Page` needs, as 6.29 to 7.4 do."""
    return hasattr(kernel, "_input_request") and hasattr(kernel, "stdin_socket")


class Page:
    """Asks with a box under the cell, as a kernel's own `input()` does, and returns before anything is
    typed."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request_id = ""

    def ask(self, prompt: str, password: bool) -> None:
        """Show the input box and return at once. `raw_input` and `getpass` make the box, but would wait for
        the answer in `_input_request`, so `_send` takes that method's place on this kernel during the
        call."""
        # Drop answers to questions that are over.
        while self._receive() is not None:
            pass
        ask = self._kernel.getpass if password else self._kernel.raw_input
        self._kernel._input_request = self._send
        try:
            ask(prompt)
        finally:
            del self._kernel._input_request

    def _send(self, prompt: str, ident: Any, parent: Any, password: bool = False) -> str:
        """Send the question only; this stands in for the function that sends and waits."""
        content = {"prompt": prompt, "password": password}
        sent = self._kernel.session.send(
            self._kernel.stdin_socket, "input_request", content, parent, ident=ident
        )
        self._request_id = sent["header"]["msg_id"]
        return ""

    def answer(self) -> str | None:
        """Return the text that was typed in the newest box; None while there is none."""
        while (reply := self._receive()) is not None:
            # Pages say which question they answer; other clients need not.
            if reply["parent_header"].get("msg_id", self._request_id) == self._request_id:
                return str(reply["content"].get("value", ""))
        return None

    def _receive(self) -> Any:
        import zmq  # imported here, because a script never asks with a box

        _, reply = self._kernel.session.recv(self._kernel.stdin_socket, mode=zmq.NOBLOCK)
        return reply
