"""The console of the `nbgpu` command."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from nbgpu.text.wrapping import wrapped


class CommandConsole(Console):
    """A console whose reader may stop reading, as `head` does: that reaches the caller as BrokenPipeError,
    where rich would end the process with 1, as after a failure."""

    def on_broken_pipe(self) -> Any:
        """Let nothing more be written, and pass the error on."""
        self.quiet = True
        raise BrokenPipeError


def width_of(console: Console) -> int | None:
    """The number of characters in a line of a terminal; None for a file, whose lines have no end."""
    return console.width if console.is_terminal else None


def say(console: Console, text: str, style: str = "") -> None:
    """Print plain text, in a terminal with lines that break between words. rich would break paths at their
    hyphens."""
    console.print(
        wrapped(text, width_of(console)), style=style or None, highlight=False, markup=False, soft_wrap=True
    )
