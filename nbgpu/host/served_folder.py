"""The copy of a folder of the notebook's host on a host that does not see the folder: tells what ranks have
written there, and takes the files that they need."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nbgpu.protocol.served import COPIES, MARK, RECEIVED, Changes, Piece, copy_of

_CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"checkpoints/step-\d{8,}")
_BEST = "best.json"
_TAKEN_BACK = re.compile(r"rank\d+\.outcome\.json|metrics\.csv|epochs\.jsonl")
"""Files that ranks remove when they begin again. The notebook's host needs none, or makes them again."""
_OF_THIS_HOST = re.compile(r"rank\d+\.endpoint\.json|.*\.unfinished|.*\.tmp")
"""Names of files that hold addresses of sockets on this host, and of files that are still being written."""
_OF_LINES = ".jsonl"
_TAIL_BYTES = 256
"""The number of last bytes that are remembered of a file that was sent. A file that has them at the same
place has grown; any other was written again."""

_Stamp = tuple[int, int, int]


@dataclass
class _Sent:
    """The part of a file that the notebook's host has."""

    offset_bytes: int = 0
    tail: bytes = b""
    inode: int = 0
    stamp: _Stamp | None = None
    """The file's state when all of it was sent; None while some of it is missing."""


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
        """Make the folder of the copy, which only the user can enter."""
        self.copy = copy_of(Path(folder), cluster_folder)
        self._sent: dict[str, _Sent] = {}
        self._checkpoints: dict[str, _Stamp] = {}
        """The checkpoints that were sent whole, each with the state of its manifest."""
        self._under_way = ""
        """The checkpoint that is being sent; empty for none."""
        top = cluster_folder / COPIES
        top.mkdir(mode=0o700, exist_ok=True)
        self.copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.copy / MARK).touch(mode=0o600)

    def remove(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.copy, ignore_errors=True)

    def put(self, piece: Piece) -> int:
        """Write a piece of a file of the notebook's host, which is not sent back; return the bytes that the
        file has then. They are fewer than expected if the pieces before it are missing: then nothing was
        written."""
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
        parts = PurePosixPath(relative).parts
        if not parts or relative.startswith("/") or ".." in parts:
            raise ValueError(f"{relative!r} is no file in a served folder")
        return self.copy.joinpath(*parts)

    def sizes(self, relative: str) -> dict[str, int]:
        """The sizes of the files in a folder of the copy, by name."""
        folder = self._place(relative)
        return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}

    def _sizes_if_there(self, relative: str) -> dict[str, int]:
        try:
            return self.sizes(relative)
        except FileNotFoundError:
            return {}

    def changes(self, max_bytes: int, have: Mapping[str, int]) -> Changes:
        """Return what was written since the last call, up to `max_bytes`. Only a single line of a .jsonl file
        may be longer, because such files are sent in whole lines.

        Small files come first, and then the checkpoints that are complete here, the newest first.

        Args:
            max_bytes: the most to return.
            have: files with fewer bytes on the other side than were sent, because it could not write them.

        Raises:
            FileNotFoundError: the copy is gone.
        """
        begun_s = time.monotonic()
        # The other side could not write all of these files, so they are sent again from where it has them.
        for path, size_bytes in have.items():
            if of_checkpoint := _CHECKPOINT.match(path):
                self._checkpoints.pop(of_checkpoint.group(), None)
            self._sent[path] = _Sent(size_bytes, b"", self._sent.get(path, _Sent()).inode)
        pieces: list[Piece] = []
        left_bytes = max_bytes
        num_bytes_left = 0
        names = list(self._names(self.copy))
        checkpoints = self._new_checkpoints()
        for name in sorted(names, key=lambda name: (not name.startswith("rank"), name)):
            if name == _BEST and checkpoints:
                continue  # it names one of them
            num_bytes, missing = self._read(name, left_bytes, pieces)
            left_bytes -= num_bytes
            num_bytes_left += missing
        whole, gone = [], []
        # The checkpoint that was being sent has been removed here meanwhile.
        if self._under_way and self._under_way not in checkpoints:
            gone.append(self._under_way)
            self._forget(self._under_way)
            self._under_way = ""
        if self._under_way:
            # A checkpoint that was begun is completed before any newer one.
            checkpoints.sort(key=lambda name: name != self._under_way)
        for checkpoint in checkpoints:
            if left_bytes <= 0:
                num_bytes_left += sum(self._sizes_if_there(checkpoint).values())
                continue
            self._under_way = checkpoint
            num_missing = 0
            for file in sorted(self._sizes_if_there(checkpoint)):
                num_bytes, missing = self._read(f"{checkpoint}/{file}", left_bytes, pieces)
                left_bytes -= num_bytes
                num_missing += missing
            num_bytes_left += num_missing
            if num_missing:
                continue
            try:
                self._checkpoints[checkpoint] = _stamp(self.copy / checkpoint / "manifest.json")
            except FileNotFoundError:  # it was removed meanwhile, in one step
                gone.append(checkpoint)
                self._forget(checkpoint)
            else:
                whole.append(checkpoint)
            self._under_way = ""
        gone += [
            name
            for name in self._sent
            if _TAKEN_BACK.fullmatch(name) and name not in names and not (self.copy / name).exists()
        ]
        for name in gone:
            self._sent.pop(name, None)
        if not (self.copy / MARK).exists():
            raise FileNotFoundError(f"{self.copy} is gone")
        return Changes(pieces, whole, gone, num_bytes_left, time.monotonic() - begun_s)

    def _forget(self, folder: str) -> None:
        """Have the files of a folder sent from their beginning if the folder appears again."""
        self._sent = {name: sent for name, sent in self._sent.items() if not name.startswith(f"{folder}/")}

    def _names(self, folder: Path, above: str = "") -> Iterator[str]:
        """Yield the files below a folder, relative to the copy, except for those of checkpoints."""
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:  # it was removed meanwhile
            return
        for entry in entries:
            name = f"{above}{entry.name}"
            if entry.name.startswith(".") or _OF_THIS_HOST.fullmatch(entry.name) or entry.is_symlink():
                continue
            if entry.is_dir():
                if not _CHECKPOINT.fullmatch(name):
                    yield from self._names(Path(entry.path), f"{name}/")
            elif entry.is_file():
                yield name

    def _new_checkpoints(self) -> list[str]:
        """The checkpoints that are complete here and not on the notebook's host, the newest first."""
        found = []
        parent = self.copy / _CHECKPOINTS
        for path in parent.glob("step-*") if parent.is_dir() else ():
            name = f"{_CHECKPOINTS}/{path.name}"
            try:
                stamp = _stamp(path / "manifest.json")
            except OSError:  # it is being removed
                continue
            if not _CHECKPOINT.fullmatch(name) or (path / RECEIVED).exists():
                continue
            if self._checkpoints.get(name) != stamp:
                if name in self._checkpoints:
                    del self._checkpoints[name]
                    self._forget(name)
                found.append(name)
        return sorted(found, key=lambda name: int(name.rpartition("-")[2]), reverse=True)

    def _read(self, name: str, max_bytes: int, pieces: list[Piece]) -> tuple[int, int]:
        """Add the next piece of a file, if there is one; return how many bytes it has, and how many come
        after it."""
        # A file that has the stamp of the last time has nothing new.
        path = self.copy / name
        try:
            stamp = _stamp(path)
        except FileNotFoundError:
            return 0, 0
        sent = self._sent.get(name, _Sent())
        if sent.stamp == stamp:
            return 0, 0
        inode, size_bytes, _ = stamp
        # A file that has only grown goes on where it was; any other is sent from its beginning.
        with path.open("rb") as file:
            offset_bytes = sent.offset_bytes if self._has_grown(name, file.fileno(), sent, stamp) else 0
            missing = size_bytes - offset_bytes
            if max_bytes <= 0:
                return 0, missing
            content = os.pread(file.fileno(), min(max_bytes, missing), offset_bytes)
            if name.endswith(_OF_LINES):
                while b"\n" not in content and len(content) < missing:
                    content += os.pread(file.fileno(), missing - len(content), offset_bytes + len(content))
            is_last = len(content) == missing
            if name.endswith(_OF_LINES):
                # A rank that takes another's place cuts half a line off.
                content = content[: content.rfind(b"\n") + 1]
        # Remember what was sent, and its end, by which a file that has grown is told from a new one.
        end_bytes = offset_bytes + len(content)
        tail = (sent.tail if offset_bytes else b"") + content
        self._sent[name] = _Sent(end_bytes, tail[-_TAIL_BYTES:], inode, stamp if is_last else None)
        if content or not offset_bytes:
            pieces.append(Piece(name, offset_bytes, content, is_last))
        return len(content), 0 if is_last else missing - len(content)

    @staticmethod
    def _has_grown(name: str, descriptor: int, sent: _Sent, stamp: _Stamp) -> bool:
        """Whether a file still begins with what was sent of it. Only the last bytes that were sent are
        compared, and the inode and size."""
        inode, size_bytes, _ = stamp
        if inode != sent.inode or size_bytes < sent.offset_bytes:
            return False
        if sent.stamp is not None and size_bytes == sent.offset_bytes and not name.endswith(_OF_LINES):
            return False  # as many other bytes
        begin_bytes = sent.offset_bytes - len(sent.tail)
        return os.pread(descriptor, len(sent.tail), begin_bytes) == sent.tail
