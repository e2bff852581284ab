"""Runs on a host that ssh reaches: reports package versions, and starts a program that outlives ssh.

The text of this module is sent over the connection, and needs only Python 3.8 and the standard library on the
host: it must report what is wrong there even if nbgpu is not installed, or Python is too old for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> None:
    """Answer a request with a line of JSON: 'versions' of this host, 'caller' (the address of the notebook's
    host, as this one sees it), and the 'pid' and 'folder' of the program, if one was started.

    Args:
        request: 'packages' whose versions are reported; 'versions' with which 'command' may be started; and
            'connection', the text of its file.
    """
    installed = versions(request["packages"])
    caller = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    answer: dict[str, Any] = {"versions": installed, "caller": caller, "pid": None, "folder": None}
    if installed == request["versions"] and request["command"]:
        folder = Path(tempfile.mkdtemp(prefix="nbgpu-"))
        try:
            write(folder / "connection.json", request["connection"])
            answer["pid"] = start(request["command"], folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        answer["folder"] = str(folder)
    sys.stdout.write(f"nbgpu {json.dumps(answer)}\n")


def versions(packages: list[str]) -> dict[str, str | None]:
    """Return the version of Python and of each package, or None for one that is not installed. This repeats
    `here` of nbgpu/host/versions.py, because that file may not be on this host."""
    installed: dict[str, str | None] = {"Python": "{}.{}".format(*sys.version_info)}
    for name in packages:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def write(path: Path, text: str) -> None:
    """Write a new file that only this user can read, from the first moment on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def start(command: list[str], folder: Path) -> int:
    """Start a program in a new session, so that it outlives the connection, and return its pid.

    Args:
        command: its arguments; '{folder}' and '{python}' stand for the folder and this interpreter.
        folder: the program's private folder, in which its output is written to `host.log`.
    """
    arguments = [
        part.replace("{folder}", str(folder)).replace("{python}", sys.executable) for part in command
    ]
    descriptor = os.open(folder / "host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w") as log:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The host program itself changes to the notebook's folder, which the join file names.
            cwd=Path.home(),
            start_new_session=True,
        )
    process.returncode = 0  # otherwise Popen warns that the process still runs
    return process.pid


if __name__ == "__main__":
    main(globals()["request"])
