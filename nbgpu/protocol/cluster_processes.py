"""Files, environment variables and names by which the processes of one cluster find and know each other."""

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
"""A file in the cluster's folder. It exists once the cluster has started, if the cluster is to outlive its
notebook's kernel."""

CLUSTER_FOLDER = "NBGPU_CLUSTER_FOLDER"
"""The environment variable that gives a cluster's processes the path of its private folder."""


def cluster_folder() -> Path | None:
    """The private folder of the cluster that this process belongs to; None where it belongs to none."""
    named = os.environ.get(CLUSTER_FOLDER)
    return Path(named) if named else None


HOST_FOLDER = "NBGPU_HOST_FOLDER"
"""Environment variable of engines on another host than the controller's: the name of the cluster's folder
there, by which the controller knows the engines of one host."""


def engine_name(pid: int, host: str = "") -> str:
    """The name under which the engine in this process registers with ipyparallel's controller; no two engines
    share one.

    Args:
        host: for an engine on another host than the controller's, a name that all engines of its host share.
    """
    return f"{pid}-{secrets.token_hex(16)}" + (f"@{host}" if host else "")


def engine_host(name: str) -> str:
    """The host of the engine that registered under a name from `engine_name`; empty for the controller's."""
    return name.partition("@")[2]


def engine_pid(name: str) -> int:
    """The pid of the engine that registered under a name from `engine_name`."""
    return int(name.partition("-")[0])


ABORT_HUNG = 79
"""The exit code of an engine that ended itself because the abort of NCCL did not come back."""
