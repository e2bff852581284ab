"""Whether processes can be watched and signalled through pidfds."""

from __future__ import annotations

import functools
import os
import signal


@functools.cache
def has_pidfds() -> bool:
    """Whether pidfds can be used. They are missing on a kernel before Linux 5.3, where a container's filter
    refuses unknown system calls, and in a Python that was built for an older kernel."""
    try:
        own = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        signal.pidfd_send_signal(own, 0)
    except (AttributeError, OSError):
        return False
    finally:
        os.close(own)
    return True
