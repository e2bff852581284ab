"""Files of a served folder that come here in pieces (served.py)."""

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
_OF_LINES = ".jsonl"


class ArrivingFiles:
    """The files of one folder. A file that grows is appended to, any other replaced once all of it is here,
    and a checkpoint gets its name once all of its files are.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path_of(self, name: str) -> Path:
        """Return where a file is written, for a checkpoint in the folder of those that are not complete.

        Raises:
            OSError: the name leads out of the folder, or through a link.
        """
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise OSError(errno.EPERM, "it is no file of this folder", name)
        if _CHECKPOINT.fullmatch(name):
            # Until all of it has come.
            parts = (parts[0], _ARRIVING, *parts[1:])
        folder = self.folder
        for part in parts[:-1]:
            folder /= part
            if folder.is_symlink():
                raise OSError(errno.EPERM, "it is a link, and nothing is written through it", str(folder))
        return folder / parts[-1]

    def num_leading_bytes(self, piece: Piece) -> int:
        """Return how many of the bytes that come before this piece in its file are here: the host has to send
        the others again."""
        with suppress(OSError):  # which `write` has reported
            path = self._path_of(piece.path)
            # What has come of a file that replaces another, and not the old file.
            for candidate in (_arriving(path), path):
                if candidate.exists():
                    return min(piece.offset_bytes, candidate.stat().st_size)
        return 0

    def write(self, piece: Piece) -> bool:
        """Write a piece. Return False if the pieces before it are not here, because somebody has changed the
        file.

        Raises:
            OSError: it cannot be written, and nothing of it was.
        """
        path = self._path_of(piece.path)
        arriving = _arriving(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.offset_bytes == 0 and piece.is_last:
            write_whole(path, piece.content)
            arriving.unlink(missing_ok=True)
        else:
            # A new file of lines is written in place, because its readers take what is there. Any other file
            # arrives under a hidden name, and replaces the old one once it is complete.
            is_replaced = piece.offset_bytes == 0 and not (path.suffix == _OF_LINES and not path.exists())
            target = arriving if is_replaced or arriving.exists() else path
            size_bytes = target.stat().st_size if piece.offset_bytes and target.exists() else 0
            if size_bytes != piece.offset_bytes:
                return False
            _append(target, piece)
            if piece.is_last and target is arriving:
                arriving.rename(path)
        return True

    def drop(self, name: str) -> None:
        """Remove a file, or the arrived part of a checkpoint, because the host has removed it."""
        path = self._path_of(name)
        if name.startswith(f"{_CHECKPOINTS}/"):
            shutil.rmtree(path.parent / _ARRIVING / path.name, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Remove the arrived parts of checkpoints that are not complete."""
        shutil.rmtree(self.folder / _CHECKPOINTS / _ARRIVING, ignore_errors=True)

    def complete(self, name: str) -> None:
        """Move a completely received checkpoint to its final name, once it is safe on the disk."""
        final = self._path_of(name)
        arrived = final.parent / _ARRIVING / final.name
        for path in (*arrived.iterdir(), arrived):
            sync(path)
        replaced = final.with_name(f"{final.name}{UNFINISHED}")
        if replaced.exists():
            # A process that was killed has left it behind, and the rename below would fail.
            shutil.rmtree(replaced)
        if final.exists():
            final.rename(replaced)
        arrived.rename(final)
        # Removing takes long. The new checkpoint has the name already if this process is killed meanwhile.
        shutil.rmtree(replaced, ignore_errors=True)
        with suppress(OSError):  # another one may be on its way
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
