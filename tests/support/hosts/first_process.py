"""Process 1 of a test host: makes its mounts and name, says its pid, and ends with whoever has started it.

Its end ends all processes of the host. Run by namespaces.py with the host's description as JSON.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

_STAGE = "/mnt"
"""Any folder that every machine has: a host's private folders are put together here."""


def main(description: dict) -> None:
    """Set the host up, then wait for the end of standard input, also where its writer is killed."""
    pid_outside = Path("/proc/self").readlink()  # because this is still the machine's /proc
    socket.sethostname(description["name"])
    _mount("-t", "proc", "proc", "/proc")
    _mount("--bind", description["hosts_file"], "/etc/hosts")
    for private in description["private"]:
        _make_private(private, description["shared"])
    for folder in ("/run/munge", "/run/sshd", "/run/lock"):
        Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
    # The kernel then removes processes that have ended and have no other parent.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(pid_outside, flush=True)
    while os.read(0, 1):
        pass


def _make_private(folder: str, shared: list[str]) -> None:
    """Cover a folder with an empty one in memory, but for the shared folders that lie in it."""
    _mount("-t", "tmpfs", "-o", "mode=1777", "private", _STAGE)
    for path in shared:
        if Path(path).is_relative_to(folder):
            inside = Path(_STAGE) / Path(path).relative_to(folder)
            inside.mkdir(parents=True, exist_ok=True)
            _mount("--bind", path, str(inside))
    _mount("--move", _STAGE, folder)


def _mount(*arguments: str) -> None:
    # The table in /run of what is mounted is the machine's.
    subprocess.run(["mount", "--no-mtab", *arguments], check=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
