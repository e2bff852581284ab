"""A cluster that nothing uses is released, also after its ranks could not be looked at for a while."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

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
