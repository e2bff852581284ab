"""The files of a checkpoint before it is complete, kept in memory or written to the disk at once."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder.checkpoint_files import Seal


class Snapshot(ABC):
    """The files of a checkpoint that is not complete: its folder does not have its final name yet.

    Args:
        step: the number of optimizer steps done.
        folder: the folder in which the files are completed; its parent exists.
    """

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Copy the content of a file; the tensors may change afterwards."""

    @abstractmethod
    def put_on_disk(self) -> dict[str, Seal]:
        """Write every file through to the disk, and return the seals by file name."""

    def _make_folder(self) -> None:
        """Make the folder, in place of one that is left over from a process that was killed at the same
        step."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def discard(self) -> None:
        """Remove the folder with its files; the snapshot is not used again."""
        shutil.rmtree(self.folder, ignore_errors=True)


class InMemory(Snapshot):
    """Files that are copied into memory, so that no step waits for a disk."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(step, folder)
        self._contents: dict[str, memoryview] = {}

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        content = BytesIO()
        for piece in pieces:
            content.write(piece)
        self._contents[name] = content.getbuffer()

    def put_on_disk(self) -> dict[str, Seal]:
        self._make_folder()
        for name, content in self._contents.items():
            write_through(self.folder / name, content)
        return {name: checkpoint_files.sealed(content) for name, content in self._contents.items()}


class OnDisk(Snapshot):
    """Files that are written to the disk piece by piece, so that no more than one piece is in memory.

    `write` returns when the operating system has the bytes in its page cache, and waits for the disk only if
    that is full.
    """

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(step, folder)
        self._names: list[str] = []
        self._make_folder()

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        self._names.append(name)
        with (self.folder / name).open("xb") as file:
            for piece in pieces:
                file.write(piece)

    def put_on_disk(self) -> dict[str, Seal]:
        for name in self._names:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())
        return {name: checkpoint_files.seal_of(self.folder / name) for name in self._names}


def write_through(path: Path, content: bytes | memoryview) -> None:
    """Write a new file, and return once the disk has it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
