"""Files, environment variables and names by which the processes of a cluster find and identify each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

CONTROLLER_PID = "controller.pid"
"""A file in the cluster's folder with the pid of the controller, without which the engines cannot be
reached."""

TAKEN = b"taken"
"""The client's answer to the fork server when it has registered a new engine."""

KEPT = "kept"
"""A file in the cluster's folder. It exists, from the end of the start on, if the cluster is to outlive its
notebook's kernel."""

CLUSTER_FOLDER = "NBGPU_CLUSTER_FOLDER"
"""The environment variable that gives a cluster's processes the path of its private folder."""


def cluster_folder() -> Path | None:
    """Return the private folder of the cluster of this process; None if it belongs to no cluster."""
    folder = os.environ.get(CLUSTER_FOLDER)
    return Path(folder) if folder else None


HOST_FOLDER = "NBGPU_HOST_FOLDER"
"""Environment variable of engines on another host than the controller's: the name of the cluster's folder on
that host, by which the controller identifies the engines of one host."""


def engine_name(pid: int, host: str = "") -> str:
    """Return the unique name under which an engine registers with ipyparallel's controller.

    Args:
        pid: the engine's process.
        host: for an engine on another host than the controller's, a name that all engines of its host share.
    """
    return f"{pid}-{secrets.token_hex(16)}" + (f"@{host}" if host else "")


def engine_host(name: str) -> str:
    """Return the host in a name from `engine_name`; empty for the controller's host."""
    return name.partition("@")[2]


def engine_pid(name: str) -> int:
    """Return the pid in a name from `engine_name`."""
    return int(name.partition("-")[0])


ABORT_HUNG = 79
"""The exit code of an engine that ended itself because the abort of NCCL did not return."""
