"""What the processes of a cluster have written on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Whose = Literal["engines", "controller"]

_NUM_LINES = 20


def tail(folder: Path, whose: Whose = "engines") -> str:
    """The last lines that the engines or the controller wrote, as sentences for an error message."""
    pattern = "ipengine*.log" if whose == "engines" else "ipcontroller*.log"
    logs = sorted((folder / "profile" / "log").glob(pattern))
    lines = (line for log in logs for line in log.read_text(errors="replace").splitlines()[-_NUM_LINES:])
    text = "\n".join(lines)
    return f"The log of the {whose} ends with:\n{text}" if text else f"The log of the {whose} is empty."
