"""Runs on a host that ssh reaches: compares its packages, and starts a program that outlives the connection.

Its text is sent over the connection, so that it needs nothing on the host but Python 3.8: it must say what is
wrong there also where nbgpu is not installed, or Python is older than nbgpu takes.
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
    """Do what the request asks, and answer with a line of JSON."""
    found = versions(request["packages"])
    # The address of the other end of ssh's connection, as this host sees it.
    caller = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    answer: dict[str, Any] = {"versions": found, "caller": caller, "pid": None, "folder": None}
    if found == request["versions"] and request["command"]:
        folder = Path(tempfile.mkdtemp(prefix="nbgpu-"))
        try:
            write(folder / "connection.json", request["connection"])
            answer["pid"] = start(request["command"], folder, request["working_folder"])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        answer["folder"] = str(folder)
    sys.stdout.write(f"nbgpu {json.dumps(answer)}\n")


def versions(packages: list[str]) -> dict[str, str | None]:
    """Return the version of Python and of each package; None where it is not installed. The same as `here` of
    nbgpu/host/versions.py: that file may not be on this host."""
    found: dict[str, str | None] = {"Python": "{}.{}".format(*sys.version_info)}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def write(path: Path, text: str) -> None:
    """Write a file that nobody else can read at any moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def start(command: list[str], folder: Path, working_folder: str) -> int:
    """Start a program in a session of its own, and return its pid.

    Args:
        command: its words, in which '{folder}' and '{python}' stand for the folder and this interpreter.
        folder: of this program alone.
        working_folder: the folder to run in; the home folder where it is not here.
    """
    words = [word.replace("{folder}", str(folder)).replace("{python}", sys.executable) for word in command]
    descriptor = os.open(folder / "host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w") as log:
        # The end of the connection does not end it, and it reads nothing from there.
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=working_folder if working_folder and Path(working_folder).is_dir() else Path.home(),
            start_new_session=True,
        )
    process.returncode = 0  # or Python would warn that it still runs
    return process.pid


if __name__ == "__main__":
    main(globals()["request"])
