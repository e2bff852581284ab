"""Brings a checkpoint of rank 0's host to the hosts that have only copies of the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from nbgpu.engine.group import exchange, group
from nbgpu.engine.group.consensus import raise_together, together
from nbgpu.protocol import served
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder.checkpoint_files import MANIFEST, UNFINISHED

_PIECE_BYTES = 2**23


def everywhere(checkpoint: Path) -> Path:
    """Send a checkpoint to the hosts that lack it; return its path on this rank's host. A collective.

    Args:
        checkpoint: the path on the notebook's host; the same on all ranks.
    """
    place = served.here(checkpoint)
    lacks_it = served.is_copy(place) and bool(checkpoint_files.damage(place, contents=False))
    if not any(exchange.gather_numbers(int(lacks_it))):
        return place
    # One rank of each host writes.
    writes = lacks_it and group.membership().local_rank == 0
    has_it = group.membership().rank == 0
    sizes = exchange.broadcast(together(lambda: _sizes(place) if has_it else {}), source=0)
    raise_together(_send_files(place, sizes, writes))
    return place


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Return the sizes in bytes of a checkpoint's files, by name; the manifest is the last one."""
    return {
        name: (checkpoint / name).stat().st_size
        for name in (*checkpoint_files.read(checkpoint).seals, MANIFEST)
    }


def _send_files(place: Path, sizes: Mapping[str, int], writes: bool) -> Exception | None:
    """Send a checkpoint's files from rank 0 to the ranks that write them, in pieces; return this rank's
    error, if any. A collective.

    After an error a rank still takes part in all broadcasts, because the others would wait for it.

    Args:
        place: the checkpoint's path on this rank's host.
        sizes: the size in bytes of each file, the same on all ranks.
        writes: whether this rank writes the files.
    """
    failures: list[Exception] = []

    @contextmanager
    def keeping_errors() -> Iterator[None]:
        """Suppress an error of the disk in the block, and keep the first one in `failures`."""
        try:
            yield
        except OSError as error:
            failures[:] = failures or [error]

    unfinished = place.with_name(f"{place.name}{UNFINISHED}")
    is_source = group.membership().rank == 0
    # A rank that was killed in `_give_name` has left a folder that `served` would take for a received copy.
    with keeping_errors():
        if writes and unfinished.exists():
            shutil.rmtree(unfinished)
    with ExitStack() as files:
        for name, size_bytes in sizes.items():
            file: BinaryIO | None = None
            with keeping_errors():
                if writes:
                    unfinished.mkdir(parents=True, exist_ok=True)
                    file = files.enter_context((unfinished / name).open("wb"))
                elif is_source:
                    file = files.enter_context((place / name).open("rb"))
            for begin_bytes in range(0, size_bytes, _PIECE_BYTES):
                num_bytes = min(_PIECE_BYTES, size_bytes - begin_bytes)
                content = b""
                with keeping_errors():
                    if is_source and file is not None:
                        content = file.read(num_bytes)
                        if len(content) < num_bytes:
                            raise OSError(f"{place / name} has become shorter while it was sent")
                # Every rank takes part, also after an error. If rank 0 could not read, it sends zeros.
                received = exchange.broadcast_bytes(content, num_bytes, source=0)
                with keeping_errors():
                    if writes and file is not None:
                        file.write(received)
    # If any rank failed, no host keeps its copy.
    is_whole = not any(exchange.gather_numbers(len(failures)))
    if writes and is_whole:
        with keeping_errors():
            _give_name(unfinished, place)
    if writes and (failures or not is_whole):
        shutil.rmtree(unfinished, ignore_errors=True)
    return failures[0] if failures else None


def _give_name(unfinished: Path, place: Path) -> None:
    """Rename a complete checkpoint that was received, and remove those received earlier: a host keeps one."""
    for earlier in place.parent.glob(f"*/{served.RECEIVED}"):
        shutil.rmtree(earlier.parent)
    # The mark keeps this host from sending the copy to the notebook's host, which gets the checkpoint from
    # rank 0's host.
    (unfinished / served.RECEIVED).touch()
    shutil.rmtree(place, ignore_errors=True)
    unfinished.rename(place)
