"""The interface of a rank's pending reply, by whatever way the reply arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Reply(Protocol):
    """The pending reply of one rank to a cell or a call."""

    def ready(self) -> bool:
        """Return whether the reply is here."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait for the reply, at most this many seconds; return whether it is here."""

    def result(self) -> Any:
        """Return the value, or raise the rank's exception."""

    def exception(self) -> Exception | None:
        """Return the rank's exception, or None."""

    def add_done_callback(self, tell: Callable[[Any], object], /) -> None:
        """Call `tell` with the reply once it is here, on any thread, or at once if it is here already."""
