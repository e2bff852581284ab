"""A rank's volumes in one of MONAI's datasets, cached as the settings say."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import numpy as np
import torch
from monai.data import CacheDataset, Dataset, PersistentDataset, SmartCacheDataset
from monai.transforms import Compose
from torch import Tensor

from nbgpu.config import DataSettings
from nbgpu.engine.data.decoding import Decode, Item, fingerprint_of, raise_together
from nbgpu.engine.frames import chain_of
from nbgpu.errors import DataError
from nbgpu.machine.cgroups import usable_cores

Decoded = Mapping[str, Any]


_ALIGN_BYTES = 64


class Volumes(Protocol):
    """Decoded volumes by number. A volume that could not be decoded has the key 'failure' with the exception,
    which `decoding.opened` raises."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Decoded: ...


class Shard:
    """The volumes of one rank. The volumes of an epoch are numbered from 0.

    Args:
        items: the rank's items.
        steps: decodes an Item; its steps can be pickled, and keep no state between calls.
        config: the settings, which name the dataset and its folder.
        num_cached: the number of volumes to keep in memory.
        num_replaced: the number of volumes that SmartCacheDataset replaces after each epoch; 0 for another
            dataset.
        seed: the seed of the order in which SmartCacheDataset takes them.

    Raises:
        DataError: with all bad files among the cached volumes.
    """

    def __init__(
        self,
        items: Sequence[Item],
        steps: Compose,
        config: DataSettings,
        *,
        num_cached: int,
        num_replaced: int,
        seed: int,
    ) -> None:
        self._items = items
        self._decode = Decode(steps)
        self._num_cached = num_cached
        self._num_threads = config.cache_threads or min(torch.get_num_threads(), usable_cores())
        self._smart: SmartCacheDataset | None = None
        self._volumes: Dataset
        transform = Compose([self._decode])
        self._num_replaced = num_replaced
        if num_replaced > 0:
            self._in_turn = list(items)
            np.random.RandomState(seed).shuffle(self._in_turn)  # type: ignore[arg-type]
            self._volumes = self._smart = self._smart_cache(epoch=0)
        elif num_cached > 0:
            self._volumes = CacheDataset(
                items,
                transform,
                cache_num=num_cached,
                num_workers=self._num_threads,
                progress=False,
                copy_cache=False,
            )
        elif config.dataset_kind == "persistent":
            self._volumes = _DiskCache(items, self._decode, Path(config.cache_dir))
        else:
            self._volumes = Dataset(items, transform)
        raise_together(self._decode.failures)
        if self._smart is not None:
            self._smart.start()

    def _smart_cache(self, epoch: int) -> SmartCacheDataset:
        """Return a SmartCacheDataset that holds the volumes of this epoch, counted from 0. The dataset goes
        through all volumes in a cycle, so that the epoch's first volume follows from its number."""
        first = epoch * self._num_replaced % len(self._in_turn)
        return SmartCacheDataset(
            self._in_turn[first:] + self._in_turn[:first],
            Compose([self._decode]),
            # MONAI rounds the number of volumes up; subtracting a half protects it from rounding errors.
            replace_rate=(self._num_replaced - 0.5) / self._num_cached,
            cache_num=self._num_cached,
            num_init_workers=self._num_threads,
            progress=False,
            shuffle=False,
            copy_cache=False,
        )

    @property
    def is_replacing(self) -> bool:
        """Return whether `next_epoch` changes the volumes."""
        return self._smart is not None

    def __len__(self) -> int:
        return len(self._volumes)

    def __getitem__(self, index: int) -> Decoded:
        decoded: Decoded = self._volumes[index]
        return decoded

    def cached_bytes(self) -> int:
        """Return the bytes of the decoded volumes in memory."""
        return sum(
            value.nbytes
            for index in range(self._num_cached)
            for value in self[index].values()
            if isinstance(value, Tensor)
        )

    def portable(self) -> Volumes:
        """Return this epoch's volumes in a form that can be pickled for worker processes, with cached volumes
        in shared memory."""
        if isinstance(self._volumes, _DiskCache):
            return _DiskCache(_shared(self._items), self._decode, self._volumes.folder)
        # Behind the cached volumes come those that are decoded at each visit. With SmartCacheDataset an epoch
        # has only cached volumes, and no visit asks for the others.
        cached = PackedVolumes([self[index] for index in range(self._num_cached)])
        return _Portable(cached, _shared(self._items[self._num_cached :]), self._decode)

    def next_epoch(self) -> None:
        """Put into the cache the volumes that SmartCacheDataset has decoded in the background."""
        if self._smart is not None:
            self._smart.update_cache()

    def go_to(self, epoch: int) -> None:
        """Fill the cache with exactly the volumes that SmartCacheDataset has in this epoch, counted from
        0."""
        if self._smart is not None:
            self._smart.shutdown()
            self._volumes = self._smart = self._smart_cache(epoch)
            raise_together(self._decode.failures)
            self._smart.start()

    def close(self) -> None:
        """End the threads; may be called more than once."""
        if self._smart is not None:
            self._smart.shutdown()


class _Portable:
    """The volumes of a Dataset, CacheDataset or SmartCacheDataset, for use in another process."""

    def __init__(self, cached: PackedVolumes, others: Sequence[Item], decode: Decode) -> None:
        self._cached = cached
        self._others = others
        self._decode = decode

    def __len__(self) -> int:
        return len(self._cached) + len(self._others)

    def __getitem__(self, index: int) -> Decoded:
        if index < len(self._cached):
            return self._cached[index]
        return self._decode(self._others[index - len(self._cached)])


def _shared(items: Sequence[Item]) -> Sequence[Item]:
    """Return the items in a form that other processes can use, in shared memory if they hold tensors."""
    with_tensors = any(isinstance(value, Tensor) for item in items for value in item.values())
    return PackedVolumes(items) if with_tensors else items  # type: ignore[return-value]


class _DiskCache(PersistentDataset):
    """A PersistentDataset that never reads half a file, and decodes a damaged one again.

    MONAI writes a file in the folder of temporary files and moves it. If that folder is on another disk,
    moving means copying: another rank could read half a file, and a full disk would leave a broken file for
    all later runs.
    """

    def __init__(self, items: Sequence[Item], decode: Decode, folder: Path) -> None:
        self.folder = folder
        self._decode = decode
        self._fingerprint = decode.fingerprint()
        try:
            super().__init__(items, Compose([decode]), cache_dir=folder)
        except (OSError, ValueError) as error:
            raise DataError(
                f"cache_dir={folder}: the folder cannot be made ({error}). Give another"
            ) from None

    def _transform(self, index: int) -> Decoded:
        """Return a decoded volume from its file in the folder, or decode it and write the file.

        The name of the file contains digests of the decoding steps and of the input files, so that a change
        of either leads to a new file.
        """
        item = self.data[index]
        try:
            path = self.folder / f"{self._fingerprint[:16]}-{fingerprint_of(item)[:32]}.pt"
        except OSError:
            return self._decode(item)  # the file is gone, which decoding reports
        if path.exists():
            try:
                decoded: Decoded = torch.load(path, weights_only=True)
            except (OSError, RuntimeError, EOFError, UnpicklingError):
                pass  # damaged: it is written again
            else:
                return decoded
        decoded = self._decode(item)
        if "failure" not in decoded:
            self._keep(decoded, path)
        return decoded

    def _keep(self, decoded: Decoded, path: Path) -> None:
        """Write a decoded volume to a temporary file in the same folder and rename it, so that no other
        process reads half a file."""
        partial = ""
        try:
            descriptor, partial = tempfile.mkstemp(dir=self.folder, suffix=".partial")
            with os.fdopen(descriptor, "wb") as file:
                torch.save(dict(decoded), file)
            Path(partial).replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer has no OSError for a full disk
            raise DataError(
                f"{decoded['name']}: cannot be kept in cache_dir={self.folder} ({_first_cause(error)}). Make room, give "
                "another folder, or set dataset='cache' or 'plain'"
            ) from None
        finally:
            if partial:
                Path(partial).unlink(missing_ok=True)


def _first_cause(error: BaseException) -> str:
    """Return the message of the first error in a chain: torch's writer wraps that of the operating system."""
    *_, first = chain_of(error)
    return (str(first).splitlines() or [repr(first)])[0]


class PackedVolumes:
    """Decoded volumes in one block of memory, which can be pickled for another process of the same user while
    this one lives.

    torch sends tensors to another process through /dev/shm, with an open file for each: a container has
    64 MiB there, and a forkserver takes at most 250 files. Here the block is one memfd, which has no name in
    any folder and is freed with the last process that maps it.

    Args:
        volumes: tensors by name, and small values that are pickled as they are.
    """

    def __init__(self, volumes: Sequence[Mapping[str, Any]]) -> None:
        self._layout: list[dict[str, Any]] = []
        end = 0
        for volume in volumes:
            places: dict[str, Any] = {}
            for name, value in volume.items():
                if isinstance(value, Tensor):
                    places[name] = _TensorLayout(end, tuple(value.shape), value.dtype)
                    end = math.ceil((end + value.nbytes) / _ALIGN_BYTES) * _ALIGN_BYTES
                else:
                    places[name] = value
            self._layout.append(places)
        self._num_bytes = max(end, 1)
        descriptor = os.memfd_create("nbgpu-cache")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, self._num_bytes)
        # A memfd has no name, so other processes of the user open it through this process's descriptor.
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._memory = self._mapped(shared=True)
        for index, volume in enumerate(volumes):
            for name, value in self[index].items():
                if isinstance(value, Tensor):
                    value.copy_(volume[name])

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            name: place.of(self._memory) if isinstance(place, _TensorLayout) else place
            for name, place in self._layout[index].items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A private mapping: a worker's accidental change stays in that worker.
        self._memory = self._mapped(shared=False)

    def _mapped(self, shared: bool) -> Tensor:
        return torch.from_file(self._path, shared=shared, size=self._num_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class _TensorLayout:
    """The place of a tensor in the packed memory."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return memory[self.begin : self.begin + num_bytes].view(self.dtype).view(self.shape)
