"""The table that `%nbgpu status` shows."""

from __future__ import annotations

from collections.abc import Sequence

from nbgpu.client.engines.stacks import StackSampler, described
from nbgpu.client.runs.run import Run
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.run_folder.progress import progress
from nbgpu.text.durations import duration
from nbgpu.text.tables import aligned

_ANSWER_PATIENCE_S = 0.7
_NOTABLE_CLOCK_ERROR_S = 0.1


def table(state: ClusterState, run: Run | None, sampler: StackSampler) -> str:
    """Return a table with the device, the process, the memory and the current line of every rank."""
    pids = state.ranks.pids
    assignment = state.ranks.assignment
    has_host_column = not state.config.is_local
    rows = [("rank", *(["host"] if has_host_column else []), "device", "pid", "memory", "state")]
    lost = [host.name for host in state.pool.missing()]
    sampler.ask()
    sampler.collect(_ANSWER_PATIENCE_S)
    for rank, device in enumerate(state.devices):
        used_bytes = state.ranks.resident_bytes(rank)
        memory = "" if used_bytes is None else f"{used_bytes / 2**20:.0f} MiB"
        activity = "gone" if used_bytes is None else _activity(run, rank, sampler)
        host = assignment.processes[rank].host
        if host in lost:
            memory, activity = "", "lost with its host"
        hosts = [host] if has_host_column else []
        rows.append((str(rank), *hosts, device.label(), str(pids[rank]), memory, activity))
    return "\n".join([state.describe(), *aligned(rows), *_clocks(state), *_hosts_without_ranks(state, lost)])


def _hosts_without_ranks(state: ClusterState, lost: Sequence[str]) -> list[str]:
    """Return a sentence for each host that is lost, or that has no ranks yet."""
    waiting = [host.name for host in state.pool.members if host.is_there and not host.has_ranks]
    return [
        *(f"host {name} is lost" for name in lost),
        *(f"host {name} has no ranks now: %nbgpu resize gives it some" for name in waiting),
    ]


def _clocks(state: ClusterState) -> list[str]:
    """Return a sentence for each host whose clock differs notably from this host's."""
    return [
        f"the clock of host {host.name} is {duration(abs(host.clock_ahead_s))} "
        f"{'ahead of' if host.clock_ahead_s > 0 else 'behind'} this host's: times of its ranks are corrected by that"
        for host in state.pool.with_ranks
        if abs(host.clock_ahead_s) >= _NOTABLE_CLOCK_ERROR_S
    ]


def _activity(run: Run | None, rank: int, sampler: StackSampler) -> str:
    """Describe what a live rank is doing: its line, its step in a run, or that it does not answer."""
    run_status = run.statuses()[rank] if run is not None and not run.over else None
    if sampler.silent_s(rank):
        # A rank that imports packages may hold the GIL, so that it cannot answer.
        is_loading = (
            run_status is not None and run_status.state == "loading packages" and sampler.computes(rank)
        )
        return "loading packages" if is_loading else sampler.silence(rank)
    if rank not in sampler.seen:
        return "does not say"
    where = sampler.seen[rank].where
    if run is None or run_status is None:
        return described(where)
    doing = f"{run_status.state}, {progress(run.info, run_status.state, [run_status]).in_steps}"
    if where.collective:
        return f"{doing}, waits in {where.collective}"
    return f"{doing}, {where.within}" if where.within else doing
