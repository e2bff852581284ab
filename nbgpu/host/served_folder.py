"""The copy of a folder of the notebook's host on a host without access to the folder. Files that ranks write
into the copy are sent to the notebook's host, and files that they need are received from there."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nbgpu.protocol.served import COPIES, MARK, RECEIVED, Changes, Piece, copy_of

_CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"checkpoints/step-\d{8,}")
_BEST = "best.json"
_TAKEN_BACK = re.compile(r"rank\d+\.outcome\.json|metrics\.csv|epochs\.jsonl")
"""Files whose removal is passed on. Ranks remove them when they start again; the notebook's host does not
need them, or creates them again."""
_LOCAL = re.compile(r"rank\d+\.endpoint\.json|.*\.unfinished|.*\.tmp")
"""Files that are not sent: addresses of sockets on this host, and files that are still being written."""
_LINES_SUFFIX = ".jsonl"
"""Files of JSON lines, which are sent in whole lines."""
_TAIL_BYTES = 256
"""The number of the last sent bytes of a file that are remembered. If the file still has them at the same
offset, it has only grown since; otherwise it was rewritten."""

_Stamp = tuple[int, int, int]
"""The state of a file: inode, size in bytes, and time of modification in ns."""


@dataclass
class _Sent:
    """The part of a file that the notebook's host has."""

    offset_bytes: int = 0
    """The number of bytes that were sent."""
    tail: bytes = b""
    inode: int = 0
    stamp: _Stamp | None = None
    """The file's state when all of it was sent; None while a part is missing."""


@dataclass
class _Batch:
    """The pieces that one call of `changes` returns."""

    left_bytes: int
    """The number of bytes that may still be added."""
    pieces: list[Piece] = field(default_factory=list)
    num_missing: int = 0
    """The number of bytes that the next calls have to send."""


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


class ServedFolder:
    """The copy of one folder.

    Args:
        folder: the folder, as the notebook's host calls it.
        cluster_folder: the cluster's folder on this host.
    """

    def __init__(self, folder: str, cluster_folder: Path) -> None:
        """Create the folder of the copy, which only the user can enter."""
        self.copy = copy_of(Path(folder), cluster_folder)
        self._sent: dict[str, _Sent] = {}
        """By path relative to the copy."""
        self._checkpoints: dict[str, _Stamp] = {}
        """The checkpoints that were sent completely, each with the state of its manifest."""
        self._unfinished_checkpoint = ""
        """The checkpoint that was sent only in part; empty for none."""
        top = cluster_folder / COPIES
        top.mkdir(mode=0o700, exist_ok=True)
        self.copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.copy / MARK).touch(mode=0o600)

    def remove(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.copy, ignore_errors=True)

    def put(self, piece: Piece) -> int:
        """Write a piece of a file of the notebook's host; return the file's size afterwards, in bytes. If
        previous pieces are missing, nothing is written, and the size is smaller than the caller expects."""
        path = self._place(piece.path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if piece.offset_bytes and (not path.exists() or path.stat().st_size != piece.offset_bytes):
            return path.stat().st_size if path.exists() else 0
        with path.open("ab" if piece.offset_bytes else "wb") as file:
            file.write(piece.content)
        size_bytes = path.stat().st_size
        self._sent[piece.path] = _Sent(size_bytes, b"", path.stat().st_ino, _stamp(path))
        checkpoint = _CHECKPOINT.match(piece.path)
        if checkpoint and piece.path.endswith("/manifest.json"):
            self._checkpoints[checkpoint.group()] = _stamp(path)
        return size_bytes

    def _place(self, relative: str) -> Path:
        """Return the path of a file in the copy; ValueError for a path that leads out of the copy."""
        parts = PurePosixPath(relative).parts
        if not parts or relative.startswith("/") or ".." in parts:
            raise ValueError(f"{relative!r} is no file in a served folder")
        return self.copy.joinpath(*parts)

    def sizes(self, relative: str) -> dict[str, int]:
        """Return the sizes in bytes of the files in a folder of the copy, by name; empty if there is no such
        folder."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return {path.name: path.stat().st_size for path in self._place(relative).iterdir()}
        return {}

    def changes(self, max_bytes: int, have: Mapping[str, int]) -> Changes:
        """Return the files that were written since the last call, up to `max_bytes`. The limit is exceeded
        only by a single longer line of a .jsonl file, because such files are sent in whole lines.

        Small files come first, and then the checkpoints that are complete here, the newest first.

        Args:
            max_bytes: the largest number of bytes to return.
            have: the sizes in bytes of files that the notebook's host could not write completely; they are
                sent again from there.

        Raises:
            FileNotFoundError: the copy was removed.
        """
        begun_s = time.monotonic()
        for path, size_bytes in have.items():
            if match := _CHECKPOINT.match(path):
                self._checkpoints.pop(match.group(), None)
            self._sent[path] = _Sent(size_bytes, b"", self._sent.get(path, _Sent()).inode)
        batch = _Batch(max_bytes)
        names = list(self._names(self.copy))
        checkpoints = self._new_checkpoints()
        for name in sorted(names, key=lambda name: (not name.startswith("rank"), name)):
            # best.json refers to a checkpoint, so it waits until all of them were sent.
            if name != _BEST or not checkpoints:
                self._read(name, batch)
        whole, gone = self._read_checkpoints(checkpoints, batch)
        gone += [
            name
            for name in self._sent
            if _TAKEN_BACK.fullmatch(name) and name not in names and not (self.copy / name).exists()
        ]
        for name in gone:
            self._sent.pop(name, None)
        if not (self.copy / MARK).exists():
            raise FileNotFoundError(f"{self.copy} is gone")
        return Changes(batch.pieces, whole, gone, batch.num_missing, time.monotonic() - begun_s)

    def _read_checkpoints(self, checkpoints: list[str], batch: _Batch) -> tuple[list[str], list[str]]:
        """Add pieces of checkpoints to a batch; return the checkpoints that have now been sent completely,
        and those that were removed while they were being sent."""
        whole, gone = [], []
        if self._unfinished_checkpoint and self._unfinished_checkpoint not in checkpoints:
            gone.append(self._unfinished_checkpoint)
            self._forget(self._unfinished_checkpoint)
            self._unfinished_checkpoint = ""
        # An unfinished checkpoint is completed before any newer one.
        for checkpoint in sorted(checkpoints, key=lambda name: name != self._unfinished_checkpoint):
            if batch.left_bytes <= 0:
                batch.num_missing += sum(self.sizes(checkpoint).values())
                continue
            self._unfinished_checkpoint = checkpoint
            missing_before = batch.num_missing
            for file in sorted(self.sizes(checkpoint)):
                self._read(f"{checkpoint}/{file}", batch)
            if batch.num_missing > missing_before:
                continue
            try:
                self._checkpoints[checkpoint] = _stamp(self.copy / checkpoint / "manifest.json")
            except FileNotFoundError:  # the checkpoint was removed in the meantime
                gone.append(checkpoint)
                self._forget(checkpoint)
            else:
                whole.append(checkpoint)
            self._unfinished_checkpoint = ""
        return whole, gone

    def _forget(self, folder: str) -> None:
        """Forget what was sent of a folder, so that it is sent from the beginning if it appears again."""
        self._sent = {name: sent for name, sent in self._sent.items() if not name.startswith(f"{folder}/")}

    def _names(self, folder: Path, above: str = "") -> Iterator[str]:
        """Yield the files below a folder, relative to the copy, except for those of checkpoints."""
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:  # the folder was removed in the meantime
            return
        for entry in entries:
            name = f"{above}{entry.name}"
            if entry.name.startswith(".") or _LOCAL.fullmatch(entry.name) or entry.is_symlink():
                continue
            if entry.is_dir():
                if not _CHECKPOINT.fullmatch(name):
                    yield from self._names(Path(entry.path), f"{name}/")
            elif entry.is_file():
                yield name

    def _new_checkpoints(self) -> list[str]:
        """Return the checkpoints that are complete here and not on the notebook's host, the newest first."""
        checkpoints = []
        for path in (self.copy / _CHECKPOINTS).glob("step-*"):
            name = f"{_CHECKPOINTS}/{path.name}"
            try:
                stamp = _stamp(path / "manifest.json")
            except OSError:  # the checkpoint is being removed
                continue
            if not _CHECKPOINT.fullmatch(name) or (path / RECEIVED).exists():
                continue
            if self._checkpoints.get(name) != stamp:
                if name in self._checkpoints:
                    del self._checkpoints[name]
                    self._forget(name)
                checkpoints.append(name)
        return sorted(checkpoints, key=lambda name: int(name.rpartition("-")[2]), reverse=True)

    def _read(self, name: str, batch: _Batch) -> None:
        """Add the next piece of a file to a batch, if the file has changed since it was last sent."""
        path = self.copy / name
        try:
            stamp = _stamp(path)
        except FileNotFoundError:
            return
        sent = self._sent.get(name, _Sent())
        if sent.stamp == stamp:
            return
        inode, size_bytes, _ = stamp
        try:
            file = path.open("rb")
        except FileNotFoundError:  # it was removed meanwhile
            return
        # A file that has only grown is continued; any other is sent from its beginning.
        with file:
            offset_bytes = sent.offset_bytes if self._has_grown(name, file.fileno(), sent, stamp) else 0
            missing = size_bytes - offset_bytes
            if batch.left_bytes <= 0:
                batch.num_missing += missing
                return
            content = os.pread(file.fileno(), min(batch.left_bytes, missing), offset_bytes)
            if name.endswith(_LINES_SUFFIX):
                while b"\n" not in content and len(content) < missing:
                    content += os.pread(file.fileno(), missing - len(content), offset_bytes + len(content))
            is_last = len(content) == missing
            if name.endswith(_LINES_SUFFIX):
                # A partial line is not sent, because the rank that replaces the writer cuts it off.
                content = content[: content.rfind(b"\n") + 1]
        # The tail shows later whether the file has only grown.
        end_bytes = offset_bytes + len(content)
        tail = (sent.tail if offset_bytes else b"") + content
        self._sent[name] = _Sent(end_bytes, tail[-_TAIL_BYTES:], inode, stamp if is_last else None)
        if content or not offset_bytes:
            batch.pieces.append(Piece(name, offset_bytes, content, is_last))
        batch.left_bytes -= len(content)
        batch.num_missing += 0 if is_last else missing - len(content)

    @staticmethod
    def _has_grown(name: str, descriptor: int, sent: _Sent, stamp: _Stamp) -> bool:
        """Return whether a file still begins with the part that was sent. To save time, only the inode, the
        size and the tail are compared."""
        inode, size_bytes, _ = stamp
        if inode != sent.inode or size_bytes < sent.offset_bytes:
            return False
        if sent.stamp is not None and size_bytes == sent.offset_bytes and not name.endswith(_LINES_SUFFIX):
            return False  # the file was rewritten with the same size
        begin_bytes = sent.offset_bytes - len(sent.tail)
        return os.pread(descriptor, len(sent.tail), begin_bytes) == sent.tail
