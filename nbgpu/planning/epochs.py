"""The steps and shards of an epoch and the sizes of the held-out parts, computed from the settings and the
number of volumes.

A rank has the same volumes (its shard) during the whole run, because it may keep them decoded in memory. All
ranks must do the same number of optimizer steps in an epoch, and all steps have the same number of samples.
Where the numbers do not divide evenly, samples are repeated or left out: the setting `shards` decides which,
and `EpochPlan.words` says how many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbgpu.config import DataSettings, TrainConfig
from nbgpu.text.ranks import count_of_ranks


@dataclass(frozen=True)
class EpochPlan:
    """One epoch of a run. Tuples have a value for each rank."""

    num_volumes: int
    """The number of volumes of all ranks, each counted once."""
    shard_sizes: tuple[int, ...]
    """The number of volumes of each rank."""
    num_cached: tuple[int, ...]
    """The number of volumes that each rank keeps decoded in host memory."""
    num_replaced: tuple[int, ...]
    """The number of cached volumes that each rank replaces after an epoch (SmartCacheDataset). If it is above
    0, an epoch uses only the cached volumes."""
    num_steps: int
    """The number of optimizer steps, the same on every rank."""
    num_repeated: int
    """The number of samples, over all ranks, that are used a second time to fill the shards and the last
    step."""
    num_left_out: int
    """The number of samples, over all ranks, that do not fit into the epoch's steps."""
    words: tuple[str, ...]
    """The plan in sentences for the user."""


class DataAmount(NamedTuple):
    """The numbers of volumes and samples of a run, which are known without decoding the data."""

    num_volumes: int
    """The number of training volumes."""
    samples_per_volume: int
    """The number of samples, such as patches, that are drawn from each volume in an epoch."""
    num_held_out: int = 0
    """The number of volumes for validation and the test."""


def epochs_in_words(num_epochs: float) -> str:
    """Return a number of epochs as text, such as '0.333', '12.5' or '1250'."""
    return f"{num_epochs:.0f}" if num_epochs >= 100 else f"{num_epochs:.3g}"


def share_of(count: int, rate: float) -> int:
    """Return the share `rate` of `count`, rounded up. It is first rounded to 6 digits, because 100 * 0.07 is
    a little above 7 in floating point and would become 8."""
    return math.ceil(round(count * rate, 6))


def epoch_of(config: TrainConfig, amount: DataAmount, world_size: int) -> EpochPlan:
    """Plan the epochs of a run.

    Args:
        config: the run's settings.
        amount: the number of volumes and of their samples.
        world_size: the number of ranks.
    """
    num_volumes, samples_per_volume, num_held_out = amount
    sizes = _shard_sizes(config, num_volumes, world_size)

    # Which of its volumes each rank caches and replaces.
    cache_rate = config.cache_rate if config.dataset_kind in ("cache", "smart") else 0
    num_cached = tuple(share_of(size, cache_rate) for size in sizes)
    num_replaced = tuple(
        min(share_of(cached, config.replace_rate), size - cached) if config.dataset_kind == "smart" else 0
        for size, cached in zip(sizes, num_cached, strict=True)
    )
    if 0 in num_replaced:  # a rank that caches all its volumes has no others; then no rank replaces any
        num_replaced = (0,) * world_size
    replaces = any(num_replaced)
    num_used = num_cached if replaces else sizes

    # The steps of the epoch, which are the same on all ranks, and the samples that they take.
    per_step = config.batch_size * config.accumulate
    samples = [num * samples_per_volume for num in num_used]
    if config.shards == "padded":
        num_steps = math.ceil(max(samples) / per_step)
    else:
        num_steps = max(1, min(samples) // per_step)
    num_taken = num_steps * per_step
    num_left_out = sum(max(0, num - num_taken) for num in samples)
    if num_volumes < world_size and not replaces:
        # All ranks have the same volumes and leave out as many samples, which count once.
        num_left_out //= world_size
    num_in_all = sum(samples) if replaces else num_volumes * samples_per_volume
    num_repeated = world_size * num_taken - (num_in_all - num_left_out)
    sentences = (
        _explain_shards(config, sizes, num_volumes) + _explain_held_out(num_held_out),
        _explain_memory(config, sizes, num_cached, num_replaced),
        _explain_steps(num_steps, num_taken * world_size, num_repeated, num_left_out, replaces),
    )
    return EpochPlan(
        num_volumes, sizes, num_cached, num_replaced, num_steps, num_repeated, num_left_out, sentences
    )


def epoch_of_samples(config: TrainConfig, amount: DataAmount, world_size: int) -> tuple[int, tuple[str, ...]]:
    """Plan the epochs of a user's own dataset, from which all ranks draw samples without a cache.

    Args:
        config: the run's settings.
        amount: the number of samples, as that of volumes.
        world_size: the number of ranks.

    Returns:
        (The number of optimizer steps of an epoch, sentences about the epoch for the user).
    """
    per_step = config.samples_per_step(world_size)
    num_samples = amount.num_volumes
    num_steps, rest = divmod(num_samples, per_step)
    if rest and (config.shards == "padded" or not num_steps):
        num_steps += 1
    num_taken = num_steps * per_step
    repeated, left_out = max(0, num_taken - num_samples), max(0, num_samples - num_taken)
    shared = f" over {world_size} ranks" if world_size > 1 else " on one rank"
    sentence = _explain_steps(num_steps, num_taken, repeated, left_out, only_cached=False)
    order = (
        f"{num_samples} samples{shared}, in another order each time{_explain_held_out(amount.num_held_out)}"
    )
    return num_steps, (order, sentence)


def _shard_sizes(config: TrainConfig, num_volumes: int, world_size: int) -> tuple[int, ...]:
    """Return the number of volumes of each rank. With fewer volumes than ranks, every rank has all
    volumes."""
    if num_volumes < world_size:
        return (num_volumes,) * world_size
    whole, rest = divmod(num_volumes, world_size)
    if config.shards == "padded":
        return (whole + bool(rest),) * world_size
    return tuple(whole + (rank < rest) for rank in range(world_size))


def _explain_shards(config: TrainConfig, sizes: tuple[int, ...], num_volumes: int) -> str:
    """Return a sentence on how the volumes are divided among the ranks."""
    world_size = len(sizes)
    if world_size == 1:
        return f"{_count(config, num_volumes)} on one rank"
    sentence = f"{_count(config, num_volumes)} over {world_size} ranks"
    if num_volumes < world_size:
        return f"{sentence}: fewer than ranks, so each rank takes all of them and draws its own samples"
    if len(set(sizes)) > 1:
        num_more = sizes.count(max(sizes))
        more = "1 rank has" if num_more == 1 else f"{num_more} ranks have"
        return f"{sentence}: {more} {max(sizes)}, the others {min(sizes)}"
    num_shared = sum(sizes) - num_volumes
    shared = f"; {num_shared} of them on two ranks, so that all have as many" if num_shared else ""
    return f"{sentence}: {sizes[0]} on each{shared}"


def _explain_held_out(num_held_out: int) -> str:
    """Return the end of a sentence about the training volumes, with the number of those held out; empty if
    there are none."""
    if not num_held_out:
        return ""
    return f"; {num_held_out} more {'is' if num_held_out == 1 else 'are'} held out"


def _explain_memory(
    config: TrainConfig, sizes: tuple[int, ...], num_cached: tuple[int, ...], num_replaced: tuple[int, ...]
) -> str:
    """Return a sentence on which volumes a rank keeps in memory, and how often the other volumes are decoded.
    The numbers are those of rank 0."""
    size, cached, replaced = sizes[0], num_cached[0], num_replaced[0]
    if config.dataset_kind == "persistent":
        return f"PersistentDataset: every {config.VOLUME} is decoded once, and read from {config.cache_dir} from then on"
    if cached == 0:
        return f"Dataset: every {config.VOLUME} is decoded each time that it is used"
    if replaced:
        return (
            f"SmartCacheDataset: an epoch uses the {cached} of {size} {config.VOLUME}s that a rank has in memory; "
            f"{replaced} of them {'gives' if replaced == 1 else 'give'} way to the next after each epoch"
        )
    which = f"its only {config.VOLUME}" if size == 1 else f"{cached} of its {_count(config, size)}"
    kept = f"CacheDataset: a rank keeps {which} decoded in host memory"
    if config.dataset_kind == "smart":
        return f"{kept}; there is nothing to replace them with"
    return kept if cached == size else f"{kept}, and decodes the others each time that they are used"


def _explain_steps(
    num_steps: int, num_taken: int, num_repeated: int, num_left_out: int, only_cached: bool
) -> str:
    """Return a sentence on the steps of an epoch, and on samples that are repeated or left out.

    Args:
        num_steps: the number of steps.
        num_taken: the number of samples of all steps, over all ranks.
        num_repeated, num_left_out: the number of samples that are used twice, and not at all.
        only_cached: whether an epoch uses only the cached volumes.
    """
    sentence = (
        f"an epoch has {num_steps} step{'s' if num_steps != 1 else ''} of {num_taken // num_steps} samples"
    )
    if not num_repeated and not num_left_out:
        return f"{sentence} and uses {'each of these' if only_cached else 'every sample'} exactly once"
    parts = []
    if num_repeated:
        parts.append(f"{num_repeated} of its {num_taken} samples are repeats")
    if num_left_out:
        parts.append(f"{num_left_out} are left out, other ones each time")
    return f"{sentence}; {', and '.join(parts)}"


def _count(config: TrainConfig, number: int) -> str:
    return f"{number} {config.VOLUME}{'s' if number != 1 else ''}"


def held_out(num_groups: int, config: DataSettings) -> tuple[int, int]:
    """Return (the number of groups for validation, the number for the test): at least one for each part whose
    fraction is above 0, if there are enough groups. At least one group is left for training."""

    def count(fraction: float, most: int) -> int:
        return max(0, min(max(1, round(fraction * num_groups)), most)) if fraction else 0

    # Validation leaves one group for training, and one for the test if there is a test.
    num_validation = count(config.val_fraction, num_groups - 1 - bool(config.test_fraction))
    return num_validation, count(config.test_fraction, num_groups - 1 - num_validation)


def on_other_ranks(config: TrainConfig, num_before: int, num_now: int) -> tuple[dict[str, Any], str]:
    """Return (the settings that change when a run goes on with another number of ranks, a sentence about the
    samples of its steps).

    A step keeps its number of samples if possible. The batch of a rank does not become larger, because it may
    not fit into memory: a rank with more samples accumulates them over micro-batches.

    Args:
        config: the settings on the earlier number of ranks.
        num_before: the earlier number of ranks.
        num_now: the new number of ranks.
    """
    if "batch_size" in config.UNUSED:
        return {}, ""
    num_samples = config.samples_per_step(num_before)
    per_rank = max(1, round(num_samples / num_now))
    batch_size = next(size for size in range(min(config.batch_size, per_rank), 0, -1) if per_rank % size == 0)
    changes: dict[str, Any] = {"batch_size": batch_size, "accumulate": per_rank // batch_size}
    if config.global_batch_size is not None:
        changes["global_batch_size"] = None
    as_before = (
        f"A step has {num_samples} samples as before"
        if per_rank * num_now == num_samples
        else f"{num_samples} samples of a step do not divide among {count_of_ranks(num_now)}: a step has {per_rank * num_now} now"
    )
    return changes, f"{as_before}, with batch_size={batch_size} and accumulate={per_rank // batch_size}."
