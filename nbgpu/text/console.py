"""The console of the `nbgpu` command."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class CommandConsole(Console):
    """A console whose reader may stop reading, as `head` does: that reaches the caller as BrokenPipeError,
    where rich would end the process with 1, as after a failure."""

    def on_broken_pipe(self) -> Any:
        """Let nothing more be written, and pass the error on."""
        self.quiet = True
        raise BrokenPipeError
