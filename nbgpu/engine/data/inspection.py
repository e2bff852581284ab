"""Decodes all files of a run before its first step, to find damaged ones, and remembers the good ones.

A good file is not read again until it changes or is decoded in another way, so that a person who tries
several settings waits only once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from monai.transforms import Compose

from nbgpu.config import DataSettings
from nbgpu.engine.data.decoding import Decode, Item, fingerprint_of
from nbgpu.errors import DataError

CACHE_VARIABLE = "NBGPU_CACHE_DIR"
"""The environment variable with the folder of the remembered files; without it the person's cache folder is
used."""

_log = logging.getLogger("nbgpu.data")
_NUM_THREADS = 4
"""The number of reading threads, each of which holds a volume."""


def require_share(
    config: DataSettings, items: Sequence[Item], steps: Compose, rank: int, world_size: int
) -> None:
    """Read a rank's share of the files, unless the settings skip this or the cache reads all files anyway.

    Raises:
        DataError: with a line for each unusable file.
    """
    if not are_read_anyhow(config):
        require(config, items[rank::world_size], steps)


def are_read_anyhow(config: DataSettings) -> bool:
    """Return whether the ranks' caches decode all training files before the first step, and so find the bad
    ones."""
    return config.dataset_kind == "cache" and config.cache_rate == 1


def require(config: DataSettings, items: Sequence[Item], steps: Compose) -> None:
    """Read all files, unless the settings skip this.

    Raises:
        DataError: with a line for each unusable file.
    """
    if lines := problems(config, items, steps):
        raise DataError("\n".join(lines))


def problems(config: DataSettings, items: Sequence[Item], steps: Compose) -> list[str]:
    """Return a line for each file that cannot be decoded with these steps; none if `check_voxels` is off.

    Raises:
        Exception: an error of the steps that is not about the data.
    """
    items = [item for item in items if any(isinstance(value, Path) for value in item.values())]
    if not config.check_voxels or not items:
        return []
    decode = Decode(steps)
    # The file of good files is named after the decoding steps: with other steps all files are read again.
    good = _GoodFiles(decode.fingerprint())
    new = [item for item in items if item not in good]
    if new:
        rest = f"; {len(items) - len(new)} were found good before" if len(new) < len(items) else ""
        # One volume that is cut into parts is several items.
        count = len({tuple(value for value in item.values() if isinstance(value, Path)) for item in new})
        what = config.VOLUME if count == 1 else f"{config.VOLUME}s"
        _log.info("reading %d %s to %s end%s", count, what, "its" if count == 1 else "their", rest)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        # Only the outcome is kept, because all volumes together may not fit into memory.
        outcomes = list(threads.map(lambda item: "failure" not in decode(item), new))
    good.add([item for item, is_good in zip(new, outcomes, strict=True) if is_good])
    lines: set[str] = set()
    for failure in decode.failures:
        if not isinstance(failure, DataError):
            raise failure
        lines.update(str(failure).splitlines())
    return sorted(lines)


class _GoodFiles:
    """The fingerprints of good files, stored in the person's cache folder, in one file for each way to
    decode.

    Lines are only ever appended, so that several ranks and runs may write at the same time.
    """

    def __init__(self, way_to_decode: str) -> None:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = os.environ.get(CACHE_VARIABLE) or Path(cache_home) / "nbgpu"
        self._path = Path(folder) / "good-files" / way_to_decode[:32]
        try:
            self._known = set(self._path.read_text().split())
        except FileNotFoundError:
            self._known = set()

    def __contains__(self, item: Item) -> bool:
        try:
            return fingerprint_of(item) in self._known
        except OSError:  # the file is gone, which decoding reports
            return False

    def add(self, items: Sequence[Item]) -> None:
        """Record items as good. If that fails, they are read again the next time."""
        if not items:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("".join(f"{fingerprint_of(item)}\n" for item in items))
        except OSError as error:
            _log.warning("which files were found good cannot be noted in %s: %s", self._path, error)
