"""A cluster that nothing uses is released, also after its ranks could not be looked at for a while."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import pytest

from nbgpu.client.state import release
from nbgpu.client.state.release import IdleRelease

HANG_S = 300


def test_the_watch_survives_a_look_that_fails() -> None:
    looks: Iterator[bool | OSError] = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE)), False])
    released = threading.Event()

    def is_working() -> bool:
        look = next(looks, False)
        if isinstance(look, OSError):
            raise look
        return look

    watch = IdleRelease(0.2, is_working, released.set)
    assert released.wait(HANG_S)
    watch.close()


def test_a_use_shortly_before_the_end_brings_a_new_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks work just when the time is over."""
    warnings: list[str] = []
    monkeypatch.setattr(release.Notice, "show", lambda _, text: warnings.append(text) if text else None)
    looks = iter([False, True])
    released = threading.Event()
    watch = IdleRelease(0.2, lambda: next(looks, False), released.set)
    assert released.wait(HANG_S)
    watch.close()
    assert len(warnings) == 2, warnings
