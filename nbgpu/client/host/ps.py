"""`nbgpu ps` and `nbgpu stop`: list and end clusters of any notebook, also of notebooks that are gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nbgpu.client.host import registry
from nbgpu.client.host.registry import ClusterRecord, Entry
from nbgpu.client.launchers.launcher import Launcher, restored_launcher
from nbgpu.client.launchers.slurm import Slurm
from nbgpu.errors import ClusterError, NoClusterError, RunError
from nbgpu.machine import processes
from nbgpu.run_folder.progress import RunView
from nbgpu.text.tables import aligned

_SLURM_PATIENCE_S = 5.0
"""A Slurm that does not answer within this time must not hold up the table."""


def table(width: int | None = None) -> str:
    """A table of all clusters of this user on this machine, one in a line, or turned where that is wider than
    `width`, and below it the jobs that have their ranks."""
    known = registry.entries()
    notes = [
        f"{path} is not an entry of a cluster, and is passed over: remove it"
        for path in registry.unreadable()
    ]
    if not known:
        return "\n".join(["no clusters", *notes])
    rows = [("id", "notebook", "process", "ranks", "devices", "state", "age", "run")]
    rows += [
        (
            entry.id,
            entry.notebook,
            str(entry.owner.pid),
            str(len(entry.device_names())),
            ", ".join(dict.fromkeys(entry.device_names())),
            entry.state(),
            _age(time.time() - entry.started_s),
            _run(entry.run, len(entry.device_names())),
        )
        for entry in known
    ]
    jobs = [f"{entry.id}: {_job(entry.job)}" for entry in known if entry.job]
    return "\n".join([*aligned(rows, width=width), *jobs, *notes])


def stop(names: Sequence[str], everything: bool = False) -> list[str]:
    """End clusters: the named ones, or all, or with neither those that were left over.

    Returns:
        A line for each cluster that says what was ended.

    Raises:
        NoClusterError: no cluster has one of the names; nothing was ended.
        ClusterError: a process survives SIGKILL, or Slurm does not cancel a job.
    """
    known = registry.entries()
    unknown = [name for name in names if not any(entry.answers_to(name) for entry in known)]
    if unknown:
        there = ", ".join(entry.describe() for entry in known) or "none"
        raise NoClusterError(f"there is no cluster {', '.join(unknown)}. Clusters: {there}")
    if everything:
        chosen = known
    elif names:
        chosen = [entry for entry in known if any(entry.answers_to(name) for name in names)]
    else:
        chosen = [entry for entry in known if entry.state() == "left over"]
    return [_end(entry) for entry in chosen]


def _end(entry: ClusterRecord) -> str:
    """End the processes of a cluster, remove its entry and folder, and cancel its Slurm job or end its hosts.

    Returns:
        A line that says what was ended.

    Raises:
        ClusterError: a process survives SIGKILL, or Slurm does not cancel the job.
    """
    if not entry.leaders:
        return f"cluster {entry.describe()} is only just starting: try again"
    try:
        ended = processes.end(entry.leaders.values(), entry.engines.values())
    except ClusterError as error:
        raise ClusterError(f"cluster {entry.describe()}: {error}") from None
    registry.remove(entry)
    registry.remove_cluster_folder(entry.folder)
    if isinstance(entry, Entry) and entry.hosts and not entry.job:
        return f"ended cluster {entry.describe()}: {_end_hosts(entry)}"
    num_ranks = len(set(ended) & set(entry.engines.values()))
    named = ", ".join(str(process.pid) for process in ended)
    if not entry.job:
        return f"ended cluster {entry.describe()}: {num_ranks} rank(s), process(es) {named}"
    # Its hosts would end by themselves, some seconds later.
    Slurm().cancel(entry.job)
    if isinstance(entry, Entry):
        # A host that was killed has not removed the join file.
        _launcher_of(entry).end()
    # The job stays where its notebook is in it.
    what = "step" if "." in entry.job else "job"
    return f"ended cluster {entry.describe()}: {what} {entry.job}, process(es) {named}"


def _end_hosts(entry: Entry) -> str:
    """End the hosts of a cluster that no job has, and say which."""
    _launcher_of(entry).end()
    named = ", ".join(host.name for host in entry.hosts)
    # A launcher that has started them has ended them, and others hear the controller no more.
    by_themselves = "" if entry.launched else ", each within some seconds"
    return f"{len(entry.assignment.engines)} rank(s) on host(s) {named}{by_themselves}"


def _launcher_of(entry: Entry) -> Launcher:
    """Return the launcher that started the hosts of a cluster, which can end those that still run."""
    return restored_launcher(entry.config, entry.job, entry.launched)


def _job(number: str) -> str:
    """Return the state of a Slurm job, or of the job that a step belongs to, with the time that it has
    left."""
    try:
        return Slurm(patience_s=_SLURM_PATIENCE_S).state(number.partition(".")[0]).in_words()
    except ClusterError as error:
        return str(error)


def _age(age_s: float) -> str:
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= unit_s:
            return f"{age_s // unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def _run(folder: Path | None, num_ranks: int) -> str:
    """Return the name of a run, its state and its progress."""
    if folder is None:
        return ""
    try:
        view = RunView(folder, num_ranks)
        view.read()
        return view.in_words()
    except (OSError, RunError):
        return folder.name  # nothing is known about the run except its name
