"""A line below a cell's output that changes in place."""

from __future__ import annotations

import html
import sys
from typing import Any

from nbgpu.client.ipykernel import shell as ipython_shell


class Notice:
    """A line below a cell's output that changes in place, and can be removed again.

    A display can be changed where a page or a notebook file keeps it, so that no notice of a past event stays
    in a saved notebook. Outside of a kernel, printed text stays, and a line is printed once.
    """

    def __init__(self) -> None:
        self._text = ""
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show the text in place of the previous one, or remove the line if the text is empty."""
        if text == self._text:
            return
        is_new, self._text = not self._text, text
        if not hasattr(ipython_shell.current(), "kernel"):
            if is_new:
                sys.stderr.write(f"{text}\n")
            return
        # Send HTML as well: an empty plain text would still take up a line of the page.
        data = {"text/plain": text, "text/html": f"<b>{html.escape(text)}</b>" if text else ""}
        if self._handle is None:
            from IPython.display import DisplayHandle

            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)
