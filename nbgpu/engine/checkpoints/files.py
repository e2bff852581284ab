"""Writes and reads a run's state: tensors as safetensors, everything else as JSON, and nothing executable.

The layout of a checkpoint on disk, and the detection of damage, are in
`nbgpu/run_folder/checkpoint_files.py`.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.engine.checkpoints import tensor_files
from nbgpu.engine.checkpoints.snapshot import InMemory, OnDisk, Snapshot, write_through
from nbgpu.engine.checkpoints.tensor_files import StoredTensors
from nbgpu.engine.model.strategy import WholeTensors, is_sharded
from nbgpu.errors import RunError
from nbgpu.machine.files import sync
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.checkpoint_files import (
    AVERAGE,
    DISCRIMINATOR,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    UNFINISHED,
    CheckpointManifest,
    Score,
)

_FILE_BY_PREFIX = {
    "model": MODEL,
    "optimizer": OPTIMIZER,
    "average": AVERAGE,
    "discriminator": DISCRIMINATOR,
}
"""The file of each prefix: `model.conv.weight` is `conv.weight` in the model's file, where plain safetensors
finds it."""


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write `checkpoints/step-N` under the run's folder, whole or not at all.

    Args:
        folder: the run's folder.
        step: the number of optimizer steps done.
        tensors: tensors by name, which begins with `model.`, `optimizer.`, `average.` or `discriminator.`;
            none of them sharded.
        about: JSON to store with the tensors, such as the settings and the schedule's state.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the checkpoint could not be written, and nothing of it is left.
    """
    name = f"{checkpoint_files.checkpoint_name(step)}{UNFINISHED}"
    snapshot = InMemory(step, checkpoint_files.checkpoints_folder(folder) / name)
    _fill(snapshot, _by_file(tensors), gathering(tensors), about)
    return _write_complete(folder, snapshot, ())


def gathering(tensors: Mapping[str, Tensor]) -> WholeTensors:
    """Return an object that gathers the tensors of a state one by one, in the order of a checkpoint's files.
    If some are sharded, every rank has to gather all of them."""
    return WholeTensors(tensor for named in _by_file(tensors).values() for tensor in named.values())


def load(checkpoint: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return (tensors, about) of a checkpoint, as `save` was given them, with the step in `about`.

    Each tensor is read when it is looked up, and not kept, so that no more than one has to be in memory.

    Raises:
        RunError: the checkpoint is damaged.
    """
    if what := checkpoint_files.damage(checkpoint):
        raise RunError(f"checkpoint {checkpoint} is damaged ({what}). Resume from an older one")
    files = checkpoint_files.read(checkpoint).seals
    stored = {
        prefix: StoredTensors(checkpoint / file) for prefix, file in _FILE_BY_PREFIX.items() if file in files
    }
    return _Stored(stored), checkpoint_files.state(checkpoint)


class _Stored(Mapping[str, Tensor]):
    """The tensors of a checkpoint's files, by their names with the prefix of the file, such as
    'model.conv.weight'."""

    def __init__(self, files: Mapping[str, StoredTensors]) -> None:
        self._files = files

    def __getitem__(self, full_name: str) -> Tensor:
        prefix, _, name = full_name.partition(".")
        return self._files[prefix][name]

    def __iter__(self) -> Iterator[str]:
        return (f"{prefix}.{name}" for prefix, file in self._files.items() for name in file)

    def __len__(self) -> int:
        return sum(map(len, self._files.values()))


def point_to_earlier_best(folder: Path, resumed_from: Path, score: Score) -> str | None:
    """Record the best earlier checkpoint in a resumed run; it may be in an earlier run's folder.

    Args:
        folder: the run's folder.
        resumed_from: the checkpoint that the run resumes.
        score: the score of the best validation so far.

    Returns:
        A note if the best checkpoint is gone; None otherwise.
    """
    # The best checkpoint lies beside the resumed one, or where the earlier run's own pointer leads.
    candidates = [resumed_from.with_name(checkpoint_files.checkpoint_name(score.step))]
    try:
        earlier = checkpoint_files.best(resumed_from.parents[1])
    except ValueError as error:
        return str(error)
    if earlier is not None and earlier.score == score:
        candidates.append(earlier.checkpoint)
    for candidate in candidates:
        if not checkpoint_files.damage(candidate, contents=False):
            checkpoint_files.point_to_best(folder, candidate, score)
            return None
    return (
        f"the best checkpoint so far, of step {score.step} with {score.metric} {score.value:.4g}, is not on the disk any "
        "more; the next one that is better is kept"
    )


class Writer:
    """Writes the checkpoints of a run in a thread, so that a slow disk delays no step and no other rank.

    The state is copied first, because training continues meanwhile: into memory, or if it is sharded to a
    file, tensor by tensor, because the whole of it may be larger than a rank's memory. A checkpoint that
    cannot be written is reported, and does not end the run.

    Args:
        folder: the run's folder.
        keep: how many of the newest intact checkpoints stay; the best one stays besides.
        tell: is called with (kind of event, text, step), also on the writing thread.
    """

    def __init__(self, folder: Path, keep: int, tell: Callable[[str, str, int], None]) -> None:
        self._folder = folder
        self._keep = keep
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nbgpu-checkpoint")
        self._writing: Future[None] | None = None
        self._step = 0
        self._best: tuple[Snapshot, Score] | None = None
        """The best checkpoint so far, while it waits for another one to be written."""
        self._best_lock = threading.Lock()
        self._num_snapshots = 0
        self._unfinished: set[Path] = set()
        """The folders of the snapshots that are not complete yet."""

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], score: Score | None = None
    ) -> None:
        """Copy the state and begin to write it; problems are reported and not raised. A collective if the
        state is sharded: the other ranks call `gathering(tensors).take_rest()`.

        Args:
            step, tensors, about: as for `save`.
            score: the score of the validation, if it is the best so far. If another checkpoint is still being
                written, one with a score waits, and replaces an earlier one that waits. One without a score
                is skipped, with a note.
        """
        whole = gathering(tensors)
        if score is None and self._writing is not None and not self._writing.done():
            text = f"no checkpoint at step {step}: the one of step {self._step} is still being written"
            self._tell("note", text, step)
            whole.take_rest()
            return
        try:
            snapshot = self._copy(step, tensors, whole, about)
        except Exception as error:
            # The failure of a collective concerns all ranks.
            if whole.failure is not None:
                raise
            # Training continues after others, such as a full disk or a lack of memory.
            self._tell("note", self._failure(step, error), step)
            return
        self._step = step
        if score is None:
            self._writing = self._thread.submit(self._write_or_report, snapshot)
            return
        with self._best_lock:
            if self._best is not None:
                self._remove(self._best[0].folder)
            self._best = snapshot, score
        self._writing = self._thread.submit(self._write_best)

    def finish(
        self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], score: Score | None = None
    ) -> None:
        """Write the last checkpoint and wait for it. A collective if the state is sharded.

        Args:
            step, tensors, about: as for `save`.
            score: the score of the validation, if it is the best so far.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        whole = gathering(tensors)
        try:
            snapshot = self._copy(step, tensors, whole, about)
            self._writing = self._thread.submit(self._write, snapshot, score)
            self._writing.result()
        except Exception as error:
            if whole.failure is not None:
                raise
            raise RunError(self._failure(step, error)) from error

    def wait(self) -> None:
        """Wait until nothing is being written any more."""
        if self._writing is not None:
            futures.wait([self._writing])

    def close(self) -> None:
        """Let the thread end after the current checkpoint, without waiting for it."""
        self._thread.shutdown(wait=False)

    def _copy(
        self, step: int, tensors: Mapping[str, Tensor], whole: WholeTensors, about: Mapping[str, Any]
    ) -> Snapshot:
        """Copy the state into a snapshot. If that fails on this rank, still take part in gathering the
        tensors that are left: the other ranks wait for this one's shards."""
        self._num_snapshots += 1
        # Numbered, because the same step may be saved again while its first snapshot waits.
        name = f"{checkpoint_files.checkpoint_name(step)}.{self._num_snapshots}{UNFINISHED}"
        folder = checkpoint_files.checkpoints_folder(self._folder) / name
        snapshot: Snapshot
        try:
            if is_sharded(tensors.values()):
                _parent(self._folder)
                # Added before the folder is made, because the writing thread removes unfinished folders that
                # are not in this set.
                self._unfinished.add(folder)
                snapshot = OnDisk(step, folder)
            else:
                snapshot = InMemory(step, folder)
            _fill(snapshot, _by_file(tensors), whole, about)
        except Exception:
            self._remove(folder)
            whole.take_rest()
            raise
        # The client has interrupted all ranks, none of which gathers any more.
        except BaseException:
            self._remove(folder)
            raise
        return snapshot

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._unfinished.discard(folder)

    def _write_best(self) -> None:
        """Write the best checkpoint that waits; do nothing if an earlier call has written it. Runs on the
        writing thread."""
        with self._best_lock:
            best, self._best = self._best, None
        if best is not None:
            self._write_or_report(*best)

    def _write_or_report(self, snapshot: Snapshot, score: Score | None = None) -> None:
        try:
            self._write(snapshot, score)
        except Exception as error:  # noqa: BLE001 - training continues after any error, and a note says so
            self._tell("note", self._failure(snapshot.step, error), snapshot.step)

    def _write(self, snapshot: Snapshot, score: Score | None) -> None:
        """Write a snapshot to the disk, mark it as the best if it has a score, and remove old checkpoints.
        Runs on the writing thread."""
        step = snapshot.step
        try:
            path = _write_complete(self._folder, snapshot, self._unfinished)
        finally:
            self._unfinished.discard(snapshot.folder)
        best = ""
        if score is not None:
            best = f", the best so far: {score.metric} {score.value:.4g}"
            try:
                checkpoint_files.point_to_best(self._folder, path, score)
            except OSError as error:
                best += f", which could not be noted: {error.strerror}"
        self._tell("checkpoint", path.name + best, step)
        try:
            checkpoint_files.remove_old(self._folder, self._keep)
        except (OSError, ValueError) as error:
            self._tell("note", f"an old checkpoint could not be removed: {error}", step)

    def _failure(self, step: int, error: Exception) -> str:
        """Return the text about a checkpoint that could not be written, with its cause and the last good
        checkpoint."""
        cause = error.strerror if isinstance(error, OSError) and error.strerror else f"{error!r}"
        last = checkpoint_files.newest_whole(self._folder, contents=False).checkpoint
        kept = f"the last good one is {last.name}" if last is not None else "there is no earlier one"
        return f"checkpoint at step {step} could not be written: {cause}; {kept}"


def _by_file(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors by the file to which they belong and by their names there, in the order of the
    files."""
    by_file: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
    for full_name, tensor in tensors.items():
        prefix, name = full_name.split(".", 1)
        by_file.setdefault(_FILE_BY_PREFIX[prefix], {})[name] = tensor
    return {file: tensor_files.in_order(named) for file, named in by_file.items()}


def _fill(
    snapshot: Snapshot,
    by_file: Mapping[str, Mapping[str, Tensor]],
    whole: WholeTensors,
    about: Mapping[str, Any],
) -> None:
    """Copy a state into a snapshot: the tensors may change once this returns."""
    for file, named in by_file.items():
        snapshot.write(file, tensor_files.pieces(named, lambda: whole.next().detach().cpu()))
    state = json.dumps({"step": snapshot.step, **about}, indent=2) + "\n"
    snapshot.write(STATE, [state.encode()])


def _parent(folder: Path) -> Path:
    """Return the folder of a run's checkpoints, and make it if it is not there."""
    runs.require_own(folder)
    parent = checkpoint_files.checkpoints_folder(folder)
    if parent.exists():
        runs.require_own(parent)
    parent.mkdir(exist_ok=True)
    return parent


def _write_complete(folder: Path, snapshot: Snapshot, unfinished: Collection[Path]) -> Path:
    """Write a snapshot's files to the disk and rename its folder, so that a checkpoint is complete or not
    there at all; return the checkpoint's folder.

    Args:
        folder: the run's folder.
        snapshot: the files of the checkpoint.
        unfinished: the folders of other snapshots that are still needed.
    """
    parent = _parent(folder)
    final = parent / checkpoint_files.checkpoint_name(snapshot.step)
    # Processes that were killed have left these behind.
    for leftover in parent.glob(f"*{UNFINISHED}"):
        if leftover != snapshot.folder and leftover not in unfinished:
            shutil.rmtree(leftover)
    try:
        if final.exists() and not checkpoint_files.damage(final):
            snapshot.discard()
            return final
        seals = snapshot.put_on_disk()
        # The manifest is the last file: a folder without one is not complete.
        manifest = CheckpointManifest(snapshot.step, time.time(), seals)
        write_through(snapshot.folder / MANIFEST, checkpoint_files.text(manifest).encode())
        sync(snapshot.folder)
        if final.exists():
            shutil.rmtree(final)
        snapshot.folder.rename(final)
    except BaseException:
        snapshot.discard()
        raise
    sync(parent)
    sync(folder)
    return final
