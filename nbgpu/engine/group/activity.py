"""A description of the work that this rank does alone while the others wait for it, for stacks.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_now = ""


def current() -> str:
    """Return a description of the work that the main thread does alone, such as 'loading packages'; empty if
    the other ranks wait for no such work."""
    return _now


@contextmanager
def during(what: str) -> Iterator[None]:
    """Have `current` return this text while the block runs. Call on the main thread.

    Args:
        what: completes 'rank 0 is', such as 'working out the result'.
    """
    global _now  # read by the thread that answers the client
    before, _now = _now, what
    try:
        yield
    finally:
        _now = before
