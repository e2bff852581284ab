"""The check of the operating system before ranks are started.

Ranks need Linux, because nbgpu uses /proc and memfds. Everything that starts no ranks works on all systems:
the version, the notebooks, the settings and their flags.
"""

from __future__ import annotations

import sys

_NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin"}
_BINDER = "https://mybinder.org/v2/gh/nbgpu/nbgpu/main?labpath=notebooks%2F00_first_run.ipynb"


def why_not() -> str:
    """Return why ranks cannot be started on this operating system, with alternatives; empty on Linux."""
    if sys.platform == "linux":
        return ""
    system = _NAMES.get(sys.platform, sys.platform)
    wsl = ", for which WSL 2 on this machine will do" if sys.platform == "win32" else ""
    return (
        f"nbgpu runs its ranks on Linux only, and this is {system}. Run the notebook on a Linux machine{wsl}, "
        "and open it in the browser here: ssh -L 8888:localhost:8888 HOST, and there "
        f"`nbgpu lab --no-browser --port 8888`. Or try it on Binder: {_BINDER}"
    )
