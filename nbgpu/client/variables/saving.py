"""The notebook's side of `%nbgpu save` and `%nbgpu load`."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgpu import saved_folder
from nbgpu.client.engines.other_hosts.served import Served
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.variables.transfer import answers
from nbgpu.errors import DataError
from nbgpu.machine import files
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.saved_folder import Manifest, RankSaved
from nbgpu.text.html import shown_as_html
from nbgpu.text.ranks import count_of_ranks, named_ranks, ranks_by
from nbgpu.text.sizes import in_words

_MAX_NAMED = 12
"""The most variables that a line names."""

Serve = Callable[[Path, Path], Served]
"""The method `ClusterState.serve`, called with a folder and the marker file in it."""


@dataclass(frozen=True)
class Saved:
    """The variables and files that a save has written; it prints as lines."""

    folder: Path
    manifest: Manifest

    @property
    def names(self) -> list[str]:
        """The variables that at least one rank has saved."""
        return self.manifest.names()

    @property
    def refused(self) -> list[str]:
        """A line for each variable that could not be saved, with the ranks where it is not all of them."""
        refused = ((line, rank) for rank, saved in enumerate(self.manifest.ranks) for line in saved.refused)
        return [
            _prefix_ranks(ranks, self.manifest.world_size, line) for line, ranks in ranks_by(refused).items()
        ]

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size_bytes for rank in self.manifest.ranks for file in rank.files.values())

    def __str__(self) -> str:
        """Return lines that say what was saved where, which variables differ between the ranks, and what was
        refused."""
        differing = [name for name in self.names if not self.manifest.is_equal_everywhere(name)]
        lines = [
            f"saved {_counted(self.names)} of {count_of_ranks(self.manifest.world_size)} in {self.folder} "
            f"({in_words(self.size_bytes)}): {_listed(self.names)}"
        ]
        if differing and self.manifest.world_size > 1:
            lines.append(f"not the same on all ranks: {_listed(differing)}")
        if self.refused:
            lines += ["not saved:", *(f"  {line}" for line in self.refused)]
        return "\n".join(lines)

    __repr__ = __str__
    _repr_html_ = shown_as_html


@dataclass(frozen=True)
class Loaded:
    """The variables that a load has given the ranks; it prints as lines."""

    folder: Path
    world_size: int
    names: Sequence[str]
    """The variables that the ranks have now."""
    left_out: Sequence[str]
    """A line for each variable that was not loaded, with the reason."""
    untrusted: Mapping[str, str]
    """For each variable that needs code to run that was not trusted: which code."""
    with_random_state: bool
    """Whether the states of the random number generators were loaded, too."""

    @property
    def needed_code(self) -> list[str]:
        """The pieces of code that were not trusted."""
        return list(dict.fromkeys(self.untrusted.values()))

    def __str__(self) -> str:
        """Return lines that say what was loaded, what was left out and why, and which code was not
        trusted."""
        lines = [
            f"loaded {_counted(self.names)} on {count_of_ranks(self.world_size)} from {self.folder}: {_listed(self.names)}"
        ]
        if self.with_random_state:
            lines.append("random numbers go on where they were")
        if self.left_out:
            lines += ["not loaded:", *(f"  {line}" for line in self.left_out)]
        if self.untrusted:
            lines.append(
                f"not loaded, because code of the folder would have to run for them ({_listed(self.needed_code)}): "
                f"{_listed(list(self.untrusted))}. If you trust it: %nbgpu load {shlex.quote(str(self.folder))} --trust"
            )
        return "\n".join(lines)

    __repr__ = __str__
    _repr_html_ = shown_as_html


def save(ranks: Ranks, served: Served, names: Sequence[str] = ()) -> Saved:
    """Write variables of all ranks into a folder: all ranks at the same time, and all files or none.

    Args:
        ranks: all ranks.
        served: the folder, served for the hosts that do not see it. It is new, or has variables that were
            saved earlier, which are replaced.
        names: the variables; all of them if none is named.

    Raises:
        DataError: the folder has other files, or cannot be written.
        RankError: a rank has no variable of a name, or cannot write its files.
        RunError: another process saves into the folder.
        CellInterrupted: the user pressed Stop. The folder has what it had before, as after any error.
    """
    folder = served.folder
    saved_folder.require_saved_or_new(folder)
    is_new = not folder.exists()
    # The new files go into a subfolder of their own. They count when `publish` writes the manifest that names
    # the subfolder, so the variables that were saved before stay whole until then.
    data = saved_folder.new_data()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = files.lock_folder(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        served.begin().follow()
        try:
            by_rank: dict[int, RankSaved] = answers(
                ranks, lambda: ranks.call(Call.SAVE_VARIABLES, str(folder), data, list(names))
            )
        finally:
            served.finish_or_stop()
        _require_arrived(served, data, by_rank)
        manifest = Manifest(data, time.time(), [by_rank[rank] for rank in range(len(ranks))])
        saved_folder.publish(folder, manifest)
    except BaseException as error:
        shutil.rmtree(folder / data, ignore_errors=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
        raise
    finally:
        os.close(lock)
        served.forget()
    return Saved(folder, manifest)


def _require_arrived(served: Served, data: str, by_rank: Mapping[int, RankSaved]) -> None:
    """Raise DataError if a file that a rank has written has not arrived here whole from its host."""
    if not served.is_needed:
        return
    for rank, saved in by_rank.items():
        if damage := saved_folder.damage(saved_folder.rank_folder(served.folder, data, rank), saved):
            raise DataError(
                ". ".join([f"{damage}: the files of rank {rank} did not come here", *served.problems])
            )


def load(ranks: Ranks, folder: Path, serve: Serve, names: Sequence[str] = (), trust: bool = False) -> Loaded:
    """Give the ranks variables that were saved: each rank its own or, if the number of ranks has changed, all
    ranks those that were equal everywhere.

    Args:
        ranks: all ranks.
        folder: the folder of the saved variables.
        serve: `ClusterState.serve`.
        names: the variables; all of them if none is named.
        trust: whether pickles may be opened and definitions of cells be run, which can do anything.

    Raises:
        DataError: the folder has no saved variables, or none of a name, or is damaged.
        RankError: a rank cannot read its files. No variable was changed.
        ClusterError: a host that does not see the folder could not be brought its files.
        CellInterrupted: the user pressed Stop. No variable was changed.
    """
    folder = folder.absolute()
    manifest = saved_folder.read(folder)
    if missing := [name for name in names if name not in manifest.names()]:
        raise DataError(
            f"{folder} has no variable {', '.join(missing)}. It has: {_listed(manifest.names(), most=100)}"
        )
    same_size = manifest.world_size == len(ranks)
    wanted = list(names) or manifest.names()
    left_out: list[str] = []
    if not same_size:
        differing = [name for name in wanted if not manifest.is_equal_everywhere(name)]
        wanted = [name for name in wanted if name not in differing]
        there_are = "there is" if len(ranks) == 1 else "there are"
        left_out += [
            f"{name}: not the same on the {count_of_ranks(manifest.world_size)} that there were, and {there_are} "
            f"{len(ranks)} now"
            for name in differing
        ]
    served = serve(folder, folder / saved_folder.MANIFEST)
    _distribute(served, ranks, manifest)
    try:
        # First all ranks read the variables. Then all assign those that every rank could read.
        staged = answers(ranks, lambda: _stage(ranks, folder, manifest, wanted, trust))
        ready, untrusted, failed = _combine_staged(staged)
        with_random_state = same_size and not names
        with uninterrupted():
            # An interrupt between two ranks would leave them with different variables.
            ranks.wait_for(ranks.call(Call.TAKE_STAGED, ready, with_random_state))
    except BaseException:
        # A busy rank drops its staged variables when it is idle again; the replies are not waited for.
        ranks.call(Call.DROP_STAGED, ranks=[rank for rank in range(len(ranks)) if rank not in ranks.gone()])
        raise
    finally:
        served.forget()
    return Loaded(folder, len(ranks), ready, [*left_out, *failed], untrusted, with_random_state)


def _distribute(served: Served, ranks: Ranks, manifest: Manifest) -> None:
    """Bring the files of the ranks to the hosts that do not see the folder."""
    if not served.is_needed:
        return
    served.begin()
    host_of = {rank: process.host for rank, process in ranks.assignment.processes.items()}
    same_size = manifest.world_size == len(ranks)
    for rank in range(manifest.world_size):
        # With another number of ranks a host needs the files of all ranks, because a value that is sharded
        # over the ranks is assembled from all shards.
        to = [host_of[rank]] if same_size else None
        inside = saved_folder.rank_folder(Path(), manifest.data, rank)
        served.copy_folder(str(inside), to=to)


def describe_folder(folder: Path) -> str:
    """Return a clause that names the folder of saved variables and the command that loads them."""
    path = str(folder.absolute())
    return f"the ranks' variables are in {path}: %nbgpu load {shlex.quote(path)}"


def _stage(
    ranks: Ranks, folder: Path, manifest: Manifest, wanted: Sequence[str], trust: bool
) -> dict[int, Any]:
    """Have each rank read its variables without assigning them, and return the pending replies by rank. If
    the number of ranks has changed, every rank reads those of rank 0, because only variables that are equal
    on all ranks are wanted then."""
    replies: dict[int, Any] = {}
    for rank in range(len(ranks)):
        saved_by = rank if manifest.world_size == len(ranks) else 0
        there = [name for name in wanted if name in manifest.ranks[saved_by].fingerprints]
        arguments = (str(folder), manifest.data, saved_by, manifest.ranks, there, trust)
        replies |= ranks.call(Call.STAGE_VARIABLES, *arguments, ranks=[rank])
    return replies


def _combine_staged(
    staged: Mapping[int, tuple[list[str], dict[str, str], list[str]]],
) -> tuple[list[str], dict[str, str], list[str]]:
    """Combine what the ranks answered, so that all of them take the same variables.

    Args:
        staged: for each rank (the names that it has read, the code that would have to run for a variable by
            its name, a line 'NAME: reason' for each variable that cannot be rebuilt).

    Returns:
        The same for all ranks; the names are those that every rank could read that has saved them.
    """
    untrusted = {name: code for _, needs_trust, _ in staged.values() for name, code in needs_trust.items()}
    failed = ranks_by((line, rank) for rank, (_, _, lines) in staged.items() for line in lines)
    unready = {*untrusted, *(line.partition(":")[0] for line in failed)}
    ready = sorted({name for names, _, _ in staged.values() for name in names} - unready)
    return ready, untrusted, [_prefix_ranks(ranks, len(staged), line) for line, ranks in failed.items()]


def _prefix_ranks(ranks: Sequence[int], world_size: int, line: str) -> str:
    """Return the line, with the ranks in front if they are not all."""
    return line if len(ranks) == world_size else f"{named_ranks(ranks)}: {line}"


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} variable{'' if len(names) == 1 else 's'}"


def _listed(names: Sequence[str], most: int = _MAX_NAMED) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
