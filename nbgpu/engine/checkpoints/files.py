"""Writes and reads a run's state: tensors as safetensors, everything else as JSON, and nothing executable.

The layout of a checkpoint on disk, and the detection of damage, are in
`nbgpu/run_folder/checkpoint_files.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from nbgpu.errors import RunError
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
    Manifest,
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
        tensors: tensors by name, which begins with `model.`, `optimizer.`, `average.` or `discriminator.`.
        about: JSON to store with the tensors, such as the settings and the schedule's state.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the checkpoint could not be written, and nothing of it is left.
    """
    return _write(folder, step, _as_bytes(step, tensors, about))


def load(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, about) as given to `save`, with the step in `about`; RunError if the checkpoint is
    damaged."""
    if what := checkpoint_files.damage(checkpoint):
        raise RunError(f"checkpoint {checkpoint} is damaged ({what}). Resume from an older one")
    files = checkpoint_files.read(checkpoint).seals
    tensors = {
        f"{prefix}.{name}": tensor
        for prefix, file in _FILE_BY_PREFIX.items()
        if file in files
        for name, tensor in load_file(checkpoint / file).items()
    }
    return tensors, checkpoint_files.state(checkpoint)


def point_to_earlier_best(folder: Path, resumed_from: Path, score: Score) -> str | None:
    """Record the best earlier checkpoint in a resumed run; it may be in an earlier run's folder.

    Args:
        folder: the run's folder.
        resumed_from: the checkpoint that the run resumes.
        score: the score of the best validation so far.

    Returns:
        A note if the best checkpoint is gone; None otherwise.
    """
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

    The state is copied first, because training continues meanwhile. A checkpoint that cannot be written is
    reported, and does not end the run.

    Args:
        folder: the run's folder.
        keep: how many of the newest whole checkpoints stay; the best one stays besides.
        tell: is called with (kind of event, text, step), also on the writing thread.
    """

    def __init__(self, folder: Path, keep: int, tell: Callable[[str, str, int], None]) -> None:
        self._folder = folder
        self._keep = keep
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nbgpu-checkpoint")
        self._writing: Future[None] | None = None
        self._step = 0
        self._best: tuple[int, Mapping[str, bytes], Score] | None = None
        """The best checkpoint so far, while it waits for another one to be written."""
        self._best_lock = threading.Lock()

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], score: Score | None = None
    ) -> None:
        """Copy the state and begin to write it; problems are reported and not raised.

        Args:
            step, tensors, about: as for `save`.
            score: the score of the validation, if it is the best so far. Such a checkpoint waits if another
                one is being written, in place of an earlier best one; any other is then skipped, with a note.
        """
        if score is None and self._writing is not None and not self._writing.done():
            text = f"no checkpoint at step {step}: the one of step {self._step} is still being written"
            self._tell("note", text, step)
            return
        try:
            files = _as_bytes(step, tensors, about)
        except Exception as error:  # noqa: BLE001 - most likely a lack of memory; training continues
            self._tell("note", self._failure(step, error), step)
            return
        self._step = step
        if score is None:
            self._writing = self._thread.submit(self._write_or_tell, step, files)
            return
        with self._best_lock:
            self._best = step, files, score
        self._writing = self._thread.submit(self._write_best)

    def finish(
        self, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], score: Score | None = None
    ) -> None:
        """Write the last checkpoint and wait for it; RunError if it cannot be written. `score` as in
        `begin`."""
        try:
            files = _as_bytes(step, tensors, about)
            self._writing = self._thread.submit(self._write, step, files, score)
            self._writing.result()
        except Exception as error:
            raise RunError(self._failure(step, error)) from error

    def wait(self) -> None:
        """Wait until nothing is being written any more."""
        if self._writing is not None:
            futures.wait([self._writing])

    def close(self) -> None:
        """Let the thread end after the current checkpoint, without waiting for it."""
        self._thread.shutdown(wait=False)

    def _write_best(self) -> None:
        with self._best_lock:
            best, self._best = self._best, None
        if best is not None:
            self._write_or_tell(*best)

    def _write_or_tell(self, step: int, files: Mapping[str, bytes], score: Score | None = None) -> None:
        try:
            self._write(step, files, score)
        except Exception as error:  # noqa: BLE001 - training continues after any error, and a note says so
            self._tell("note", self._failure(step, error), step)

    def _write(self, step: int, files: Mapping[str, bytes], score: Score | None) -> None:
        path = _write(self._folder, step, files)
        if score is not None:
            checkpoint_files.point_to_best(self._folder, path, score)
        best = f", the best so far: {score.metric} {score.value:.4g}" if score is not None else ""
        self._tell("checkpoint", path.name + best, step)
        try:
            _remove_old(self._folder, self._keep)
        except (OSError, ValueError) as error:
            self._tell("note", f"an old checkpoint could not be removed: {error}", step)

    def _failure(self, step: int, error: Exception) -> str:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else f"{error!r}"
        last = checkpoint_files.newest_whole(self._folder, contents=False).checkpoint
        kept = f"the last good one is {last.name}" if last is not None else "there is no earlier one"
        return f"checkpoint at step {step} could not be written: {cause}; {kept}"


def _as_bytes(step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a copy of the contents of each file: the tensors may change while they are written."""
    by_file: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
    storages = set()
    for full_name, tensor in tensors.items():
        prefix, name = full_name.split(".", 1)
        on_cpu = tensor.detach().cpu().contiguous()
        # Tied weights: safetensors does not support two names for the same numbers.
        storage = on_cpu.untyped_storage().data_ptr()
        by_file.setdefault(_FILE_BY_PREFIX[prefix], {})[name] = (
            on_cpu.clone() if storage in storages else on_cpu
        )
        storages.add(storage)
    # As bytes and not with save_file, which holds the GIL for as long as the disk takes.
    files = {file: to_safetensors(named) for file, named in by_file.items()}
    return files | {STATE: (json.dumps({"step": step, **about}, indent=2) + "\n").encode()}


def _write(folder: Path, step: int, files: Mapping[str, bytes]) -> Path:
    runs.require_own(folder)
    parent = checkpoint_files.checkpoints_folder(folder)
    if parent.exists():
        runs.require_own(parent)
    final = parent / checkpoint_files.checkpoint_name(step)
    if final.exists() and not checkpoint_files.damage(final):
        return final
    parent.mkdir(exist_ok=True)
    for leftover in parent.glob(f"*{UNFINISHED}"):
        shutil.rmtree(leftover)
    seals = {name: checkpoint_files.sealed(content) for name, content in files.items()}
    unfinished = final.with_name(final.name + UNFINISHED)
    try:
        unfinished.mkdir()
        for name, content in files.items():
            _write_to_disk(unfinished / name, content)
        _write_to_disk(
            unfinished / MANIFEST, checkpoint_files.text(Manifest(step, time.time(), seals)).encode()
        )
        _sync_folder(unfinished)
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync_folder(parent)
    _sync_folder(folder)
    return final


def _write_to_disk(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Put the folder's entries on the disk; otherwise a file may be safe and its name not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(folder: Path, keep: int) -> None:
    """Remove checkpoints older than the newest `keep` whose files have the right sizes, except the best."""
    best = checkpoint_files.best(folder)
    num_whole = 0
    for checkpoint in checkpoint_files.checkpoints(folder):
        if num_whole == keep and best is not None and checkpoint == best.checkpoint:
            continue
        if num_whole == keep:
            # Renamed first, so that a half-removed checkpoint is never taken for a damaged one.
            shutil.rmtree(checkpoint.rename(checkpoint.with_name(checkpoint.name + UNFINISHED)))
        elif not checkpoint_files.damage(checkpoint, contents=False):
            num_whole += 1
