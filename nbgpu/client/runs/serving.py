"""Serves a run's folder for hosts whose ranks do not see it."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from nbgpu.client.engines.other_hosts.live_records import LiveRecords
from nbgpu.client.engines.other_hosts.other_host import OtherHost
from nbgpu.client.engines.other_hosts.served import Served
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder.commands import COMMANDS, CommandWatch
from nbgpu.run_folder.rank_files import record_path
from nbgpu.run_folder.reader import Reader
from nbgpu.run_folder.resume import Beginning

_log = logging.getLogger("nbgpu.run")

_RECORDS = re.compile(r"rank(\d+)\.jsonl")
_OF_A_RANK = re.compile(r"rank\d+\.|flight-rank\d+\.|\.")
_MOST_BYTES = 2**20
"""Files that describe a run are smaller; tables of its numbers are not needed on the hosts."""
_FAREWELL_S = 5.0


def begin(folder: Path, state: ClusterState) -> Served:
    """Bring the files of a new run, and the checkpoint that it begins with, to the hosts that do not see its
    folder. If that fails, nothing is left of the folder.

    Raises:
        ClusterError: a host is lost, or cannot write.
        ConfigError: a cluster that is to be kept has hosts that do not see the folder.
    """
    try:
        checkpoints = _needed(folder)
        served = state.serve(folder)
        if served.is_needed and state.config.keep:
            raise ConfigError(
                f"{' and '.join(f'host {name}' for name in served.hosts)} cannot see {folder.parent}, and with keep=True nobody "
                "would bring the run's files from there while no notebook is connected. Give runs_dir a folder that all hosts "
                "share, or start the cluster without keep"
            )
        served.begin(keep=[path.parents[1] for path in checkpoints])
        for path in sorted(folder.iterdir()):
            if path.is_file():
                served.copy(path.name)
        _relay(served, folder, state)
        for path in checkpoints:
            give_checkpoint(state, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return served


def _needed(folder: Path) -> list[Path]:
    """Return the checkpoint that a run begins with, and the best one of the run that wrote it; none if there
    are none."""
    checkpoint = Beginning.read(folder).checkpoint
    if not checkpoint:
        return []
    best = checkpoint_files.best_if_any(Path(checkpoint).parents[1])
    needed = [Path(checkpoint)] + ([best.checkpoint] if best is not None else [])
    return [path for path in dict.fromkeys(needed) if path.is_dir()]


def give_checkpoint(state: ClusterState, checkpoint: Path) -> None:
    """Bring a checkpoint, and what describes its run, to the hosts that do not see it.

    Raises:
        ClusterError: a host is lost, or cannot write.
    """
    folder, manifest = checkpoint.parents[1], checkpoint / checkpoint_files.MANIFEST
    if not manifest.is_file():
        return  # the ranks say what is wrong with it
    served = state.serve(folder, marker=manifest).open()
    for path in sorted(folder.iterdir()):
        if path.is_file() and not _OF_A_RANK.match(path.name) and path.stat().st_size <= _MOST_BYTES:
            served.copy(path.name)
    served.copy_folder(f"{checkpoint.parent.name}/{checkpoint.name}", last=checkpoint_files.MANIFEST)


def _relay(served: Served, folder: Path, state: ClusterState) -> None:
    """Relay to the host of rank 0 the person's commands, and the records of the ranks on other hosts, from
    which rank 0 makes the run's logs."""
    host_of = {rank: process.host for rank, process in state.ranks.assignment.processes.items()}
    others = [record_path(folder, rank) for rank, name in host_of.items() if name != host_of[0]]
    served.relay(host_of[0], [(path, path.name) for path in (folder / COMMANDS, *others)])


def follow(
    served: Served, folder: Path, config: TrainConfig, reader: Reader, state: ClusterState
) -> LiveRecords:
    """Bring here what the ranks write from now on, and tell the reader of each file that has changed.

    Old checkpoints are removed here as the ranks remove theirs.

    Returns:
        What listens to the ranks of hosts that see the folder.
    """
    ranks_of = state.ranks.assignment.ranks_by_host()

    def on_file(name: str) -> None:
        if records := _RECORDS.fullmatch(name):
            reader.look_at(int(records.group(1)))

    def remove_old() -> None:
        try:
            checkpoint_files.remove_old(folder, config.keep_checkpoints)
        except (OSError, ValueError) as error:
            _log.warning("an old checkpoint of %s could not be removed: %s", folder.name, error)

    def on_answer(name: str) -> None:
        for rank in ranks_of.get(name, []):
            reader.hear(rank)

    def on_seeing_hosts() -> dict[OtherHost, list[int]]:
        present = state.ranks.assignment.ranks_by_host()
        seeing = [host for host in state.pool.with_ranks if host.name not in served.hosts]
        return {host: present[host.name] for host in seeing if host.name in present}

    served.follow(on_file, remove_old, on_answer)
    return LiveRecords(folder, on_seeing_hosts, reader)


def finish(served: Served, folder: Path, is_abandoned: Callable[[], bool]) -> None:
    """Wait until everything the ranks wrote has arrived. A stop command ends the wait at once; after the
    cluster has ended, the wait lasts at most `_FAREWELL_S`.

    Args:
        served: the run, whose files arrive from other hosts.
        folder: the run's folder.
        is_abandoned: returns whether the cluster ended while the run was being followed.
    """
    commands = CommandWatch(folder)
    commands.newest()  # what was asked before has had its effect
    abandoned_mono_s: float | None = None

    def gives_up() -> bool:
        nonlocal abandoned_mono_s
        if is_abandoned():
            abandoned_mono_s = abandoned_mono_s or time.monotonic()
            if time.monotonic() - abandoned_mono_s > _FAREWELL_S:
                return True
        return commands.newest() == "stop"

    served.finish(gives_up)
