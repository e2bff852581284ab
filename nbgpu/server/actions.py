"""The actions of JupyterLab's sidebar on a cluster: pause, resume and stop its run, show the report, and end
the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from nbgpu.client.host import ps, registry
from nbgpu.client.host.registry import AnyEntry
from nbgpu.errors import ClusterError, NoClusterError, RunError
from nbgpu.protocol.records import Command
from nbgpu.run_folder.commands import send_command
from nbgpu.run_folder.progress import RunView


def command_run(cluster_id: str, run_name: str, command: str) -> str:
    """Ask the run of a cluster to pause, to go on or to stop, and return a sentence about it.

    The request is a line in the run's folder, which rank 0 reads. So the kernel of the notebook may be busy
    or gone.

    Args:
        cluster_id: the cluster's id.
        run_name: the name of the run's folder that the sidebar has shown. The cluster may have another run by
            now.
        command: one of `Command`.

    Raises:
        NoClusterError: there is no such cluster.
        RunError: the cluster has no such run, the run is over, or its folder cannot be written.
    """
    if command not in get_args(Command):
        raise RunError(f"a run can be asked to {', '.join(get_args(Command))}, and not to {command!r}")
    entry = _find(cluster_id)
    run = _run_of(entry, run_name)
    if run.is_over:
        raise RunError(f"{run_name} is {run.state}: it cannot {command} any more")
    try:
        send_command(run.folder, command, entry.folder)  # type: ignore[arg-type]  # checked above
    except OSError as error:
        raise RunError(f"neither {run.folder} nor the cluster's folder can be written: {error}") from None
    return f"{run_name} was asked to {command}"


def end(cluster_id: str, state: str) -> str:
    """End the processes of a cluster and remove its entry and folder; return a line that names what has
    ended.

    Args:
        cluster_id: the cluster's id.
        state: the state of the cluster that the sidebar has shown. A cluster in another state goes on: one
            that was kept may be attached to a notebook again.

    Raises:
        NoClusterError: there is no such cluster.
        ClusterError: the cluster is in another state by now, or a process survives SIGKILL.
    """
    entry = _find(cluster_id)
    if entry.state() != state:
        raise ClusterError(
            f"cluster {entry.describe()} was {state} and is {entry.state()} by now. Nothing was ended: look again"
        )
    (line,) = ps.stop([cluster_id])
    return line


def report(cluster_id: str, run_name: str) -> Path:
    """Return the file with the report of a cluster's run.

    Raises:
        NoClusterError: there is no such cluster.
        RunError: the cluster has no such run, or the run has no report.
    """
    run = _run_of(_find(cluster_id), run_name)
    if not run.report.is_file() or run.report.is_symlink():
        raise RunError(f"{run_name} has no report: one is written when a run ends")
    return run.report


def _find(cluster_id: str) -> AnyEntry:
    for entry in registry.entries():
        if entry.id == cluster_id:
            return entry
    raise NoClusterError(f"there is no cluster {cluster_id} any more")


def _run_of(entry: AnyEntry, run_name: str) -> RunView:
    """Return the run of a cluster with its present state. RunError if the cluster has another run by now, or
    if the run's folder is gone."""
    if entry.run is None or entry.run.name != run_name:
        raise RunError(f"cluster {entry.id} has no run {run_name}: it may have begun another one")
    try:
        run = RunView(entry.run, len(entry.engines))
    except FileNotFoundError:
        raise RunError(f"the folder of {run_name} is gone: {entry.run}") from None
    run.read()
    return run
