"""Copies a run's files to and from hosts that do not see the run's folder."""

from __future__ import annotations

import logging
import math
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
_RANK_FILES = re.compile(r"rank\d+\.|flight-rank\d+\.|\.")
"""The beginnings of the names of files that ranks write, and of hidden files."""
_MAX_DESCRIPTION_BYTES = 2**20
"""Files that describe a run are smaller; larger ones are tables of numbers, which the hosts do not need."""
_ABANDONED_PATIENCE_S = 5.0
"""How long to wait for files after the cluster has ended."""


def begin(folder: Path, state: ClusterState) -> Served:
    """Copy the files of a new run, and the checkpoint that it begins with, to the hosts that do not see its
    folder. If that fails, the folder is removed.

    Raises:
        ClusterError: a host is lost, or cannot write.
        ConfigError: a cluster that is to be kept has hosts that do not see the folder.
    """
    try:
        checkpoints = _initial_checkpoints(folder)
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
        _relay(served, state)
        for path in checkpoints:
            give_checkpoint(state, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return served


def _initial_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint that a run begins with, and the best one of the same earlier run, which is the
    best so far; empty for a run that begins with its first step."""
    checkpoint = Beginning.read(folder).checkpoint
    if not checkpoint:
        return []
    best = checkpoint_files.best_if_any(Path(checkpoint).parents[1])
    paths = [Path(checkpoint)] if best is None else [Path(checkpoint), best.checkpoint]
    return [path for path in dict.fromkeys(paths) if path.is_dir()]


def give_checkpoint(state: ClusterState, checkpoint: Path) -> None:
    """Copy a checkpoint, and the files that describe its run, to the hosts that do not see it.

    Raises:
        ClusterError: a host is lost, or cannot write.
    """
    folder, manifest = checkpoint.parents[1], checkpoint / checkpoint_files.MANIFEST
    if not manifest.is_file():
        return  # the ranks raise an error that says what is wrong with it
    served = state.serve(folder, marker=manifest).open()
    for path in sorted(folder.iterdir()):
        is_description = path.is_file() and not _RANK_FILES.match(path.name)
        if is_description and path.stat().st_size <= _MAX_DESCRIPTION_BYTES:
            served.copy(path.name)
    served.copy_folder(f"{checkpoint.parent.name}/{checkpoint.name}", last=checkpoint_files.MANIFEST)


def _relay(served: Served, state: ClusterState) -> None:
    """Keep the host of rank 0 supplied with two things: the person's commands, and the records of ranks on
    other hosts, from which rank 0 makes the run's logs."""
    host_of = {rank: process.host for rank, process in state.ranks.assignment.processes.items()}
    others = [record_path(served.folder, rank) for rank, name in host_of.items() if name != host_of[0]]
    served.relay(host_of[0], [(path, path.name) for path in (served.folder / COMMANDS, *others)])


def follow(served: Served, config: TrainConfig, reader: Reader, state: ClusterState) -> LiveRecords:
    """Copy the files that the ranks write from now on to this host, and have the reader read each that has
    changed. Old checkpoints are removed here as the ranks remove theirs.

    Returns:
        The listener for new records of ranks on hosts that see the folder. The caller closes it.
    """
    folder = served.folder
    ranks_at_start = state.ranks.assignment.ranks_by_host()

    def on_file(name: str) -> None:
        if records := _RECORDS.fullmatch(name):
            reader.look_at(int(records.group(1)))

    def remove_old_checkpoints() -> None:
        try:
            checkpoint_files.remove_old(folder, config.keep_checkpoints)
        except (OSError, ValueError) as error:
            _log.warning("an old checkpoint of %s could not be removed: %s", folder.name, error)

    def on_answer(name: str) -> None:
        for rank in ranks_at_start.get(name, []):
            reader.hear(rank)

    def ranks_of_seeing_hosts() -> dict[OtherHost, list[int]]:
        ranks = state.ranks.assignment.ranks_by_host()
        seeing = [host for host in state.pool.with_ranks if host.name not in served.hosts]
        return {host: ranks[host.name] for host in seeing if host.name in ranks}

    served.follow(on_file, remove_old_checkpoints, on_answer)
    return LiveRecords(folder, ranks_of_seeing_hosts, reader)


def finish(served: Served, is_abandoned: Callable[[], bool]) -> None:
    """Wait until all files that the ranks wrote have arrived. A stop request ends the wait at once; after the
    cluster has ended, the wait lasts at most `_ABANDONED_PATIENCE_S`.

    Args:
        served: the run's folder, whose files arrive from other hosts.
        is_abandoned: returns whether the cluster ended while the run was being followed.
    """
    commands = CommandWatch(served.folder)
    commands.newest()  # earlier requests have had their effect
    give_up_mono_s = math.inf

    def must_give_up() -> bool:
        nonlocal give_up_mono_s
        if is_abandoned():
            give_up_mono_s = min(give_up_mono_s, time.monotonic() + _ABANDONED_PATIENCE_S)
        return time.monotonic() > give_up_mono_s or commands.newest() == "stop"

    served.finish(must_give_up)
