"""From volumes to batches: share them out, decode, cache, crop and prefetch.

    find_volumes -> check_headers (volumes.py) -> hold_out -> shard -> PatchLoader

Everything is checked as early as it can be. Names, headers and file sizes are read for every file before
training; voxels (NaN, a constant volume, damage inside the compressed data) when a volume is decoded, which
for the cached ones is before training too. A volume that is decoded later and turns out to be bad ends the
run at that step with a DataError that names it: it is never skipped, because ranks that skip different
volumes train on something that nobody asked for.

All randomness comes from (seed, rank, epoch). Neither the global random states nor the timing of the
prefetching thread have any influence, so the same settings give the same batches to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from monai.data import (
    CacheDataset,
    IterableDataset,
    ShuffleBuffer,
    SmartCacheDataset,
    ThreadDataLoader,
    partition_dataset,
)
from monai.transforms import Compose, RandCropByPosNegLabel, Transform
from monai.utils import convert_to_tensor
from torch import Tensor
from torch.nn.functional import avg_pool3d

from nbgpu.engine.volumes import READ_ERRORS, first_line
from nbgpu.errors import DataError

Item = Mapping[str, Any]
"""One volume to be decoded: `name` for messages, `image` (a path, or a tensor), and what the recipe adds."""

# ---- decoding ------------------------------------------------------------------------------------------


class Decode(Transform):
    """Turns an Item into a decoded volume with the recipe's steps, and a failure into an item, too.

    Volumes are decoded in threads that belong to MONAI: an exception there would end the replacing thread of
    SmartCacheDataset unheard, and its `update_cache` would wait for it for ever. So a failure travels as
    {"failure": exception} and is raised where a batch is asked for. `failures` keeps all of them, so that
    those which happen while the cache is filled can be reported together.
    """

    def __init__(self, steps: Compose) -> None:
        self.steps = steps
        self.failures: list[Exception] = []

    def __call__(self, item: Item) -> dict[str, Any]:
        try:
            decoded: dict[str, Any] = self.steps(dict(item))
        except Exception as error:  # noqa: BLE001  it is raised later, by `opened`
            failure = _named(error, str(item["name"]))
            self.failures.append(failure)
            return {"failure": failure}
        return decoded


def _named(error: Exception, name: str) -> Exception:
    """The DataError inside MONAI's chain of RuntimeErrors, or one that names the unreadable file."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, DataError):
        return root
    if isinstance(root, READ_ERRORS):
        return DataError(
            f"{name}: cannot be decoded ({type(root).__name__}: {first_line(root)}). The file is damaged or "
            "gone: copy it again, or leave it out"
        )
    return error  # a defect, not a bad file: it keeps its whole chain


def opened(decoded: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoded volume; raises what went wrong when it was decoded."""
    if "failure" in decoded:
        raise decoded["failure"]
    return decoded


def raise_together(failures: Sequence[Exception]) -> None:
    """Raises all DataErrors as one, a line for each, or the first of other errors; does nothing for none."""
    for failure in failures:
        if not isinstance(failure, DataError):
            raise failure
    if failures:
        # sorted: threads decode in any order, and every rank should show the same message
        raise DataError("\n".join(sorted({str(failure) for failure in failures})))


# ---- sharing out ---------------------------------------------------------------------------------------


def hold_out(items: Sequence[Item], fraction: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(training, held out): a random share of whole volumes, at least one of each where `fraction` > 0."""
    if fraction == 0 or len(items) < 2:
        return list(items), []
    num_held_out = min(max(1, round(fraction * len(items))), len(items) - 1)
    order = np.random.RandomState(seed).permutation(len(items))
    held_out = set(order[:num_held_out].tolist())
    return (
        [item for i, item in enumerate(items) if i not in held_out],
        [items[i] for i in sorted(held_out)],
    )


def shard(items: Sequence[Item], rank: int, world_size: int, seed: int) -> list[Item]:
    """The rank's volumes, the same number on every rank (the first ones are used twice to even it out).

    With fewer volumes than ranks each rank takes all of them, and its own random patches.
    """
    if len(items) < world_size:
        return list(items)
    parts: list[list[Item]] = partition_dataset(
        items, num_partitions=world_size, shuffle=True, seed=seed, even_divisible=True
    )
    return parts[rank]


# ---- batches -------------------------------------------------------------------------------------------


class PatchLoader:
    """Batches of random patches of one rank, one epoch each time that it is iterated.

    An epoch visits every volume of the rank (with SmartCacheDataset: every cached one) and crops
    `patches_per_volume` patches around random foreground voxels; patches of about four volumes are mixed. It
    has exactly `steps_per_epoch * accumulate` batches {"image": (batch_size, C, p, p, p) float32}.

    One thread crops ahead while a batch is trained on. It ends with the iteration, also when that is left in
    the middle, and `close` ends it in any case.
    """

    def __init__(
        self,
        items: Sequence[Item],
        steps: Compose,
        *,
        patch_size: int,
        patches_per_volume: int,
        batch_size: int,
        accumulate: int,
        cache_rate: float,
        replace_rate: float,
        seed: int,
        rank: int,
    ) -> None:
        """Decodes what the cache holds; raises one DataError for all the bad files among it.

        `steps` takes an Item to {"image": (C, D, H, W) tensor} with D, H, W >= patch_size and, where patches
        are to be cropped, "foreground": flat indices of the voxels that patches are centred on.
        """
        self.patch_size = patch_size
        self.patches_per_volume = patches_per_volume
        self.batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._epoch = 0
        self._num_patches_to_skip = 0
        self._accumulate = accumulate
        self._num_cache_updates = 0
        self._batches: Generator[Any, None, None] | None = None

        decode = Decode(steps)
        # Rounded up, so that one volume with cache_rate=0.5 is not decoded again in every epoch.
        num_cached = math.ceil(len(items) * cache_rate)
        self._volumes: CacheDataset
        self._smart_cache: SmartCacheDataset | None = None
        if replace_rate > 0 and 0 < num_cached < len(items):
            self._volumes = self._smart_cache = SmartCacheDataset(
                items,
                Compose([decode]),
                replace_rate=replace_rate,
                cache_num=num_cached,
                num_init_workers=torch.get_num_threads(),
                progress=False,
                seed=seed,
                copy_cache=False,
            )
        else:
            self._volumes = CacheDataset(
                items,
                Compose([decode]),
                cache_num=num_cached,
                num_workers=torch.get_num_threads(),
                progress=False,
                copy_cache=False,
            )
        raise_together(decode.failures)

        num_samples = len(self._volumes) * patches_per_volume
        self.steps_per_epoch = max(1, num_samples // (batch_size * accumulate))
        self._num_batches = self.steps_per_epoch * accumulate
        if self._smart_cache is not None:
            self._smart_cache.start()

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        self._end_iteration()
        loader = ThreadDataLoader(
            IterableDataset(_errors_as_items(self._epoch_patches(self._epoch, self._num_patches_to_skip))),  # type: ignore[arg-type]
            buffer_size=2,
            batch_size=self.batch_size,
            collate_fn=_collate,
            # its own: the default one is shared with the model's random numbers
            generator=torch.Generator().manual_seed(self._seed),
        )
        self._epoch += 1
        self._num_patches_to_skip = 0
        batches = self._batches = iter(loader)
        try:
            for batch in batches:
                if isinstance(batch, Exception):
                    raise batch
                yield batch
        finally:
            batches.close()  # waits for the thread

    def next_epoch(self) -> None:
        """Puts the volumes into the cache that SmartCacheDataset has decoded meanwhile."""
        if self._smart_cache is not None:
            self._end_iteration()
            self._smart_cache.update_cache()
            self._num_cache_updates += 1

    def seek(self, step: int) -> None:
        """The next iteration begins with the batches of this optimizer step, counted from 0 over all epochs.

        It gives what an iteration from the first step on would give there. SmartCacheDataset cannot go back to
        an earlier epoch: AssertionError.
        """
        self._end_iteration()
        self._epoch, steps = divmod(step, self.steps_per_epoch)
        self._num_patches_to_skip = steps * self._accumulate * self.batch_size
        if self._smart_cache is not None:
            assert self._num_cache_updates <= self._epoch, "the cache of an earlier epoch is gone"
            while self._num_cache_updates < self._epoch:
                self.next_epoch()

    def close(self) -> None:
        """Ends the threads; may be called more than once."""
        self._end_iteration()
        if self._smart_cache is not None:
            self._smart_cache.shutdown()

    def _end_iteration(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _epoch_patches(self, epoch: int, num_to_skip: int) -> Iterator[Tensor]:
        seeds = np.random.SeedSequence([self._seed, self._rank, epoch]).generate_state(3)
        crop_seed, order_seed, mix_seed = (int(s) for s in seeds)
        patches = self._patches_by_volume(crop_seed, np.random.RandomState(order_seed))
        # Cut off before they are mixed: afterwards, volumes of a second round could push out some of the first.
        patches = islice(patches, self._num_batches * self.batch_size)
        mixed = ShuffleBuffer(patches, buffer_size=4 * self.patches_per_volume, seed=mix_seed % 2**31)
        return islice(mixed, num_to_skip, None)

    def _patches_by_volume(self, crop_seed: int, order: np.random.RandomState) -> Iterator[Tensor]:
        crop = random_crop(self.patch_size, self.patches_per_volume, crop_seed)
        while True:
            for index in order.permutation(len(self._volumes)):
                yield from crop(opened(self._volumes[int(index)]))


def random_crop(patch_size: int, num_patches: int, seed: int) -> Callable[[Mapping[str, Any]], list[Tensor]]:
    """A function that cuts `num_patches` cubes out of a decoded volume, each (C, p, p, p).

    They are centred on random voxels among the volume's "foreground", as far as they stay inside. A volume
    with no such indices is a patch itself.
    """
    cropper = RandCropByPosNegLabel(patch_size, pos=1, neg=0, num_samples=num_patches)
    cropper.set_random_state(seed)

    def crop(volume: Mapping[str, Any]) -> list[Tensor]:
        image, foreground = volume["image"], volume.get("foreground")
        if foreground is None:
            return [image]
        # label gives the shape only, and bg_indices is never drawn from, because neg=0
        patches = cropper(image, label=image, fg_indices=foreground, bg_indices=foreground)
        return [convert_to_tensor(patch, track_meta=False) for patch in patches]

    return crop


def _errors_as_items(patches: Iterator[Tensor]) -> Iterator[Tensor | Exception]:
    """The patches, and an exception as the last item: MONAI's prefetching thread would die of it and leave
    the epoch looking finished."""
    try:
        yield from patches
    except Exception as error:  # noqa: BLE001  PatchLoader raises it in the consumer's thread
        yield error


def _collate(samples: list[Tensor | Exception]) -> dict[str, Tensor] | Exception:
    patches = []
    for sample in samples:
        if isinstance(sample, Exception):
            return sample
        patches.append(sample)
    return {"image": torch.stack(patches)}


# ---- held-out patches ----------------------------------------------------------------------------------


def grid_patches(image: Tensor, patch_size: int, max_patches: int, min_foreground: float = 0.5) -> Tensor:
    """Patches of a decoded volume (C, D, H, W) on a grid, always the same: (N, C, p, p, p), N >= 1.

    The grid is centred, and its cells overlap by half. Taken are those in which at least the share
    `min_foreground` of the voxels is brighter than the volume's mean, or, where there is none, the one with
    the largest share; of more than `max_patches` an evenly spaced choice.
    """
    p = patch_size
    stride = max(1, p // 2)
    starts = [(n - p) % stride // 2 for n in image.shape[1:]]
    bright = (image > image.mean()).float()[(slice(None), *(slice(start, None) for start in starts))]
    foreground = avg_pool3d(bright[None], p, stride)[0].mean(dim=0)
    cells = (foreground >= min(min_foreground, float(foreground.max()))).nonzero()
    if len(cells) > max_patches:
        cells = cells[torch.linspace(0, len(cells) - 1, max_patches).round().long()]
    corners = (cells * stride + torch.tensor(starts)).tolist()
    return torch.stack([image[:, x : x + p, y : y + p, z : z + p] for x, y, z in corners])
