"""`nbgpu ps` and `nbgpu stop`: list and end the clusters of all notebooks, also of those that have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nbgpu.client.host import registry
from nbgpu.client.host.registry import ClusterRecord, Entry
from nbgpu.client.launchers.launcher import restored_launcher
from nbgpu.client.launchers.slurm import Slurm
from nbgpu.errors import ClusterError, NoClusterError, RunError
from nbgpu.machine import processes
from nbgpu.run_folder.progress import RunView
from nbgpu.text.tables import aligned

_SLURM_PATIENCE_S = 5.0
"""A Slurm that does not answer within this time must not hold up the table."""


def table(width: int | None = None) -> str:
    """Return a table of this user's clusters on this host, and below it the Slurm jobs with their ranks.

    Args:
        width: the width of the terminal; in a wider table each cluster becomes a block of lines.
    """
    clusters = registry.entries()
    notes = [
        f"{path} is not an entry of a cluster, and is passed over: remove it"
        for path in registry.unreadable()
    ]
    if not clusters:
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
        for entry in clusters
    ]
    jobs = [f"{entry.id}: {_job(entry.job)}" for entry in clusters if entry.job]
    return "\n".join([*aligned(rows, width=width), *jobs, *notes])


def stop(names: Sequence[str], everything: bool = False) -> list[str]:
    """End clusters.

    Args:
        names: names of clusters; if there are none, the clusters that were left over are ended.
        everything: whether to end all clusters instead.

    Returns:
        A line for each cluster that says what was ended.

    Raises:
        NoClusterError: no cluster has one of the names; nothing was ended.
        ClusterError: a process survives SIGKILL, or Slurm does not cancel a job.
    """
    clusters = registry.entries()
    unknown = [name for name in names if not any(entry.answers_to(name) for entry in clusters)]
    if unknown:
        existing = ", ".join(entry.describe() for entry in clusters) or "none"
        raise NoClusterError(f"there is no cluster {', '.join(unknown)}. Clusters: {existing}")
    if everything:
        chosen = clusters
    elif names:
        chosen = [entry for entry in clusters if any(entry.answers_to(name) for name in names)]
    else:
        chosen = [entry for entry in clusters if entry.state() == "left over"]
    return [_end(entry) for entry in chosen]


def _end(entry: ClusterRecord) -> str:
    """End the processes of a cluster, remove its entry and folder, and cancel its Slurm job or end its hosts.
    Return a line that says what was ended.

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
    # Without this, the job would end some seconds later, when its hosts do not hear the controller any more.
    Slurm().cancel(entry.job)
    if isinstance(entry, Entry):
        # This removes the join file, which a host that was killed has left behind.
        _end_launcher(entry)
    # The steps are in the notebook's own job, which goes on.
    kind = "step" if "." in entry.job else "job"
    return f"ended cluster {entry.describe()}: {kind} {entry.job}, process(es) {named}"


def _end_hosts(entry: Entry) -> str:
    """End the hosts of a cluster without a Slurm job, and return their names and the number of ranks."""
    _end_launcher(entry)
    named = ", ".join(host.name for host in entry.hosts)
    # Hosts that no launcher has started end by themselves when they do not hear the controller any more.
    delay = "" if entry.launched else ", each within some seconds"
    return f"{len(entry.assignment.engines)} rank(s) on host(s) {named}{delay}"


def _end_launcher(entry: Entry) -> None:
    """End the hosts of a cluster that still run, with a launcher like the one that has started them."""
    restored_launcher(entry.config, entry.job, entry.launched).end()


def _job(number: str) -> str:
    """Describe the state of a Slurm job and the time that it has left.

    Args:
        number: the number of the job, or the numbers of steps of a job.
    """
    try:
        return Slurm(patience_s=_SLURM_PATIENCE_S).state(number.partition(".")[0]).in_words()
    except ClusterError as error:
        return str(error)


def _age(age_s: float) -> str:
    """'3 h', for an age in seconds."""
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
