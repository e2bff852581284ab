"""Writes the files of a folder that arrive in pieces from other hosts (served.py)."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath

from nbgpu.machine.files import sync, write_whole
from nbgpu.protocol.served import Piece
from nbgpu.run_folder.checkpoint_files import UNFINISHED

_ARRIVING = ".arriving"
_CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(rf"{_CHECKPOINTS}/step-\d{{8,}}/[^/]+")
_GROWING_SUFFIX = ".jsonl"


class ArrivingFiles:
    """The files of one folder. A growing file is appended to, and any other file is replaced once all of its
    pieces are here. A checkpoint gets its final name once all of its files are complete.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _target(self, name: str) -> Path:
        """Return the path to which a file is written. The files of a checkpoint are first written to a hidden
        folder beside its final one.

        Raises:
            OSError: the name leads out of the folder, or through a symbolic link.
        """
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise OSError(errno.EPERM, "it is no file of this folder", name)
        if _CHECKPOINT.fullmatch(name):
            parts = (parts[0], _ARRIVING, *parts[1:])
        folder = self.folder
        for part in parts[:-1]:
            folder /= part
            if folder.is_symlink():
                raise OSError(errno.EPERM, "it is a link, and nothing is written through it", str(folder))
        return folder / parts[-1]

    def num_leading_bytes(self, piece: Piece) -> int:
        """Return the offset from which the host has to send the file again, after this piece was not written:
        how many of the bytes before it are here."""
        with suppress(OSError):  # `write` has reported it
            path = self._target(piece.path)
            # The hidden file first: if it exists, the other one is an old version.
            for candidate in (_arriving(path), path):
                if candidate.exists():
                    return min(piece.offset_bytes, candidate.stat().st_size)
        return 0

    def write(self, piece: Piece) -> bool:
        """Write a piece. Return False if the pieces before it are not here, because somebody has changed the
        file.

        Raises:
            OSError: the piece cannot be written; no part of it was.
        """
        path = self._target(piece.path)
        arriving = _arriving(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.offset_bytes == 0 and piece.is_last:
            write_whole(path, piece.content)
            arriving.unlink(missing_ok=True)
        else:
            # A new growing file is written in place, because its readers accept a part. Any other file is
            # written under a hidden name, and replaces the old one once it is complete.
            is_in_place = path.suffix == _GROWING_SUFFIX and not path.exists()
            begins_hidden = piece.offset_bytes == 0 and not is_in_place
            target = arriving if begins_hidden or arriving.exists() else path
            size_bytes = target.stat().st_size if piece.offset_bytes and target.exists() else 0
            if size_bytes != piece.offset_bytes:
                return False
            _append(target, piece)
            if piece.is_last and target is arriving:
                arriving.rename(path)
        return True

    def drop(self, name: str) -> None:
        """Remove a file, or the arrived part of a checkpoint, because the host has removed it."""
        path = self._target(name)
        if name.startswith(f"{_CHECKPOINTS}/"):
            shutil.rmtree(path.parent / _ARRIVING / path.name, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Remove the arrived parts of checkpoints that are not complete."""
        shutil.rmtree(self.folder / _CHECKPOINTS / _ARRIVING, ignore_errors=True)

    def complete(self, name: str) -> None:
        """Give a checkpoint that has arrived completely its final name, once it is on the disk (fsync)."""
        final = self._target(name)
        arrived = final.parent / _ARRIVING / final.name
        for path in (*arrived.iterdir(), arrived):
            sync(path)
        replaced = final.with_name(f"{final.name}{UNFINISHED}")
        if replaced.exists():
            # An earlier process was killed before it had removed this folder, and the rename would fail.
            shutil.rmtree(replaced)
        if final.exists():
            final.rename(replaced)
        arrived.rename(final)
        # Only now, because removing takes long: if this process is killed meanwhile, the new one is in place.
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(OSError):  # another checkpoint may be arriving
            arrived.parent.rmdir()
        sync(final.parent)


def _arriving(path: Path) -> Path:
    return path.with_name(f".{path.name}{_ARRIVING}")


def _append(path: Path, piece: Piece) -> None:
    """Write all of a piece, or nothing of it."""
    with path.open("ab" if piece.offset_bytes else "wb", buffering=0) as file:
        try:
            if file.write(piece.content) < len(piece.content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(piece.offset_bytes)
            raise
