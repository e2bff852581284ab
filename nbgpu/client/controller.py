"""ipyparallel's controller, ended with the process that started it.

    python -m nbgpu.client.controller OWNER_PID [ipyparallel's arguments]

The engines have a sentinel for that, but they are not there yet while a cluster starts.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def main() -> None:
    """Runs the controller until it is told to stop or its owner is gone."""
    owner = os.pidfd_open(int(sys.argv.pop(1)))

    def end_with_owner() -> None:
        select.select([owner], [], [])
        # The controller leads a process group of its own; its helpers are in it.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_owner, name="nbgpu-owner-watch", daemon=True).start()
    from ipyparallel.controller.app import main as run_controller

    run_controller()


if __name__ == "__main__":
    main()
