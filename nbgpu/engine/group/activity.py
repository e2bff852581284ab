"""What this rank does by itself while the others wait for it, in words, for whoever asks where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_now = ""


def current() -> str:
    """Return what the main thread is at, such as 'loading packages'; empty where it is at nothing of the kind."""
    return _now


@contextmanager
def during(what: str) -> Iterator[None]:
    """Have `current` return a text while the block runs. Call on the main thread.

    Args:
        what: goes behind 'rank 0 is', such as 'working out the result'.
    """
    global _now  # the thread that answers reads it
    before, _now = _now, what
    try:
        yield
    finally:
        _now = before
