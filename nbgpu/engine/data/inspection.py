"""Reads the files of a run to their end before its first step, and remembers which were found good.

A file that was found good is not read again until it changes, or until it is prepared in another way: whoever tries a setting
after the other waits for it once.
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
"""Environment variable: the folder of what is remembered; left out: the person's cache folder."""

_log = logging.getLogger("nbgpu.data")
_NUM_THREADS = 4
"""Each holds a volume."""


def require_share(
    config: DataSettings, items: Sequence[Item], steps: Compose, rank: int, world_size: int
) -> None:
    """Reads a rank's share of the files, unless the settings leave it out or the cache reads all of them anyhow.

    Raises:
        DataError: a line for each file that cannot be used.
    """
    if not are_read_anyhow(config):
        require(config, items[rank::world_size], steps)


def are_read_anyhow(config: DataSettings) -> bool:
    """Whether the ranks' caches read all files that are trained on before the first step, and tell of the bad ones together."""
    return config.dataset_kind == "cache" and config.cache_rate == 1


def require(config: DataSettings, items: Sequence[Item], steps: Compose) -> None:
    """Reads all the files, unless the settings leave it out. Raises DataError as `require_share`."""
    if found := problems(config, items, steps):
        raise DataError("\n".join(found))


def problems(config: DataSettings, items: Sequence[Item], steps: Compose) -> list[str]:
    """A line for each file that cannot be decoded with these steps; none where `check_voxels` is off.

    Raises:
        Exception: what the steps raise that is nothing about the data.
    """
    items = [item for item in items if any(isinstance(value, Path) for value in item.values())]
    if not config.check_voxels or not items:
        return []
    decode = Decode(steps)
    good = _Good(decode.fingerprint())
    new = [item for item in items if item not in good]
    if new:
        rest = f"; {len(items) - len(new)} were found good before" if len(new) < len(items) else ""
        _log.info("reading %d volumes or masks to their end%s", len(new), rest)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        # Only whether it could be decoded: all volumes at once may be more than there is memory for.
        could = list(threads.map(lambda item: "failure" not in decode(item), new))
    good.add([item for item, is_good in zip(new, could, strict=True) if is_good])
    found = []
    for failure in decode.failures:
        if not isinstance(failure, DataError):
            raise failure
        found += str(failure).splitlines()
    return sorted(set(found))


class _Good:
    """What was found good, as fingerprints in a file of the person's cache folder, one file for each way to decode.

    Lines are only ever added, so that several ranks and runs may do that at the same time.
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
        except OSError:  # the file is gone, which decoding says
            return False

    def add(self, items: Sequence[Item]) -> None:
        """Notes items; where that cannot be, they are read again the next time."""
        if not items:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("".join(f"{fingerprint_of(item)}\n" for item in items))
        except OSError as error:
            _log.warning("which files were found good cannot be noted in %s: %s", self._path, error)
