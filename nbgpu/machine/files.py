"""Write files atomically, find files in folders, lock folders, and resolve '..' in paths."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbgpu.errors import RunError


def write_whole(
    path: Path, content: str | bytes, mode: int = 0o666, outlasts_power_cut: bool = False
) -> None:
    """Write a file atomically: at any moment a reader finds either all of the new content or all of the old.

    Args:
        path: the file, which may exist.
        content: bytes, or text to be encoded as UTF-8, with backslash escapes for lone surrogates.
        mode: the permissions of the file, before the process's umask.
        outlasts_power_cut: whether to sync the content to the disk before the file gets its name.

    Raises:
        OSError: the file could not be written; the error names `path`, and the old content is still there.
    """
    if isinstance(content, str):
        # A path in an error's message may contain bytes that are not UTF-8.
        content = content.encode("utf-8", errors="backslashreplace")
    # The name is random, because several processes may write the same file at the same time.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if outlasts_power_cut:
                file.flush()
                os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException as error:
        with suppress(OSError):  # the file may not exist
            unfinished.unlink()
        if isinstance(error, OSError):
            # The error names the file that the caller knows instead of the temporary one.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def new_folder(inside: str | Path, title: str) -> Path:
    """Return the path of a folder to be created, with a unique name that begins with the time."""
    return Path(inside).absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{title}-{secrets.token_hex(2)}"


def sync(path: Path) -> None:
    """Wait until a file's content or a folder's entries are on the disk. A new file needs both, because fsync
    of a file does not include its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(root: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, in no particular order, without hidden ones."""
    for folder in folders_below(root):
        yield from (path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())


def folders_below(root: Path) -> Iterator[Path]:
    """Yield a folder and its subfolders, in no particular order.

    Symbolic links to folders are followed, because data sets often consist of them. Each folder is yielded
    once, under its real name if that is in `root`, so that cyclic links do no harm. Hidden folders, such as
    the trash of a file system, and folders without read permission are left out.
    """
    identities: set[tuple[int, int]] = set()
    waiting = deque([root])
    while waiting:
        for name, subfolders, _ in os.walk(waiting.popleft()):
            folder = Path(name)
            status = folder.stat()
            if (status.st_dev, status.st_ino) in identities:
                subfolders.clear()
                continue
            identities.add((status.st_dev, status.st_ino))
            # Sorted, so that on every rank a folder with several links is yielded under the same link.
            subfolders[:] = sorted(part for part in subfolders if not part.startswith("."))
            waiting += [path for path in map(folder.joinpath, subfolders) if path.is_symlink()]
            yield folder


def without_parent_steps(path: Path) -> Path:
    """Return the path without '..', with symbolic links resolved as the operating system would."""
    return path.resolve() if ".." in path.parts else path


@contextmanager
def telling_what_is_not_written(tell: Callable[[str], None]) -> Iterator[None]:
    """Suppress an OSError of the block, so that a file about a run that cannot be written does not end the
    run, and call `tell` with a sentence about the error."""
    try:
        yield
    except OSError as error:
        tell(f"{error.filename or 'a file about the run'} cannot be written: {error.strerror}")


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed or this process ends. On NFS the lock holds for
    other hosts, too.

    Returns:
        The descriptor of the lock file.

    Raises:
        RunError: another process, which the message names, or another object of this process has the lock.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 100).decode()
        os.close(fd)
        raise RunError(f"{folder.name} is running in process {owner}. Stop it there first") from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd
