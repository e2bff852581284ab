"""The sizes of an epoch, its steps and the held-out parts, from the settings and the number of volumes alone.

A rank keeps its share of the volumes (its shard) for the whole run, because it may have them decoded in
memory. All ranks must do the same number of optimizer steps in an epoch, and every step takes the same number
of samples. Samples are used twice or left out where the numbers do not divide evenly: the setting `shards`
decides which, and `EpochPlan.words` says how many.
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
    """The volumes of all ranks, each counted once."""
    shard_sizes: tuple[int, ...]
    """The volumes of each rank."""
    num_cached: tuple[int, ...]
    """The volumes of each rank that stay decoded in host memory."""
    num_replaced: tuple[int, ...]
    """The cached volumes that are replaced after each epoch. Where it is above 0, an epoch uses cached
    volumes only."""
    num_steps: int
    """The optimizer steps, the same on every rank."""
    num_repeated: int
    """The samples over all ranks that are used a second time, to fill the shards and the last step."""
    num_left_out: int
    """The samples over all ranks that do not fit into the epoch's steps."""
    words: tuple[str, ...]
    """The same in sentences for the user."""


class DataAmount(NamedTuple):
    """The data of a run in numbers, known without decoding any."""

    num_volumes: int
    """The volumes to train on."""
    samples_per_volume: int
    """The samples, such as patches, that one volume gives in an epoch."""
    num_held_out: int = 0
    """The volumes for validation and the test."""


def epochs_in_words(num_epochs: float) -> str:
    """Return a number of epochs in words: '0.333', '12.5', '1250'."""
    return f"{num_epochs:.0f}" if num_epochs >= 100 else f"{num_epochs:.3g}"


def share_of(count: int, rate: float) -> int:
    """Return the share `rate` of `count`, rounded up; first to 6 digits, because 100 * 0.07 is a little above
    7 in floating point and would become 8."""
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
    kind = config.dataset_kind
    in_memory = kind in ("cache", "smart")
    num_cached = tuple(share_of(size, config.cache_rate) if in_memory else 0 for size in sizes)
    num_replaced = tuple(
        min(share_of(cached, config.replace_rate), size - cached) if kind == "smart" else 0
        for size, cached in zip(sizes, num_cached, strict=True)
    )
    if 0 in num_replaced:  # a rank that caches all its volumes replaces none, and epochs are alike on all
        num_replaced = (0,) * world_size
    num_used = num_cached if any(num_replaced) else sizes

    per_step = config.batch_size * config.accumulate
    samples = [num * samples_per_volume for num in num_used]
    if config.shards == "padded":
        num_steps = math.ceil(max(samples) / per_step)
    else:
        num_steps = max(1, min(samples) // per_step)
    num_taken = num_steps * per_step
    if num_volumes < world_size and not any(num_replaced):
        # All ranks have the same volumes, so that what each leaves out counts once.
        num_left_out = max(0, samples[0] - num_taken)
    else:
        num_left_out = sum(max(0, num - num_taken) for num in samples)
    num_in_all = sum(samples) if any(num_replaced) else num_volumes * samples_per_volume
    num_repeated = world_size * num_taken - (num_in_all - num_left_out)
    sentences = (
        _explain_shards(config, sizes, num_volumes) + _explain_held_out(num_held_out),
        _explain_memory(config, sizes, num_cached, num_replaced),
        _explain_steps(num_steps, num_taken * world_size, num_repeated, num_left_out, any(num_replaced)),
    )
    return EpochPlan(
        num_volumes, sizes, num_cached, num_replaced, num_steps, num_repeated, num_left_out, sentences
    )


def epoch_of_samples(config: TrainConfig, amount: DataAmount, world_size: int) -> tuple[int, tuple[str, ...]]:
    """Plan an epoch in which all ranks draw from one list of samples and cache none. Return (optimizer steps
    of an epoch, sentences about it)."""
    per_step = config.samples_per_step(world_size)
    num_samples = amount.num_volumes
    whole, left = divmod(num_samples, per_step)
    num_steps = whole + 1 if left and (config.shards == "padded" or not whole) else whole
    num_taken = num_steps * per_step
    repeated, left_out = max(0, num_taken - num_samples), max(0, num_samples - num_taken)
    shared = f" over {world_size} ranks" if world_size > 1 else " on one rank"
    words = _explain_steps(num_steps, num_taken, repeated, left_out, only_cached=False)
    order = (
        f"{num_samples} samples{shared}, in another order each time{_explain_held_out(amount.num_held_out)}"
    )
    return num_steps, (order, words)


def _shard_sizes(config: TrainConfig, num_volumes: int, world_size: int) -> tuple[int, ...]:
    """Return the number of volumes of each rank. With fewer volumes than ranks, every rank has all of
    them."""
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
    words = f"{_count(config, num_volumes)} over {world_size} ranks"
    if num_volumes < world_size:
        return f"{words}: fewer than ranks, so each rank takes all of them and draws its own samples"
    if len(set(sizes)) > 1:
        num_more = sizes.count(max(sizes))
        more = "1 rank has" if num_more == 1 else f"{num_more} ranks have"
        return f"{words}: {more} {max(sizes)}, the others {min(sizes)}"
    num_shared = sum(sizes) - num_volumes
    shared = f"; {num_shared} of them on two ranks, so that all have as many" if num_shared else ""
    return f"{words}: {sizes[0]} on each{shared}"


def _explain_held_out(num_held_out: int) -> str:
    """Return the end of a sentence on the volumes to train on; empty if all volumes are."""
    if not num_held_out:
        return ""
    return f"; {num_held_out} more {'is' if num_held_out == 1 else 'are'} held out"


def _explain_memory(
    config: TrainConfig, sizes: tuple[int, ...], num_cached: tuple[int, ...], num_replaced: tuple[int, ...]
) -> str:
    """Return a sentence on which volumes a rank keeps in memory, and how often the others are decoded. Rank 0
    stands for all ranks."""
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
    """Return a sentence on the steps of an epoch, and on samples that are repeated or left out."""
    words = (
        f"an epoch has {num_steps} step{'s' if num_steps != 1 else ''} of {num_taken // num_steps} samples"
    )
    if not num_repeated and not num_left_out:
        return f"{words} and uses {'each of these' if only_cached else 'every sample'} exactly once"
    parts = []
    if num_repeated:
        parts.append(f"{num_repeated} of its {num_taken} samples are repeats")
    if num_left_out:
        parts.append(f"{num_left_out} are left out, other ones each time")
    return f"{words}; {', and '.join(parts)}"


def _count(config: TrainConfig, number: int) -> str:
    return f"{number} {config.VOLUME}{'s' if number != 1 else ''}"


def held_out(num_groups: int, config: DataSettings) -> tuple[int, int]:
    """Return (the number of groups for validation, for the test): at least one in every part whose share is
    above 0, if there are enough groups, and at least one is left to train on."""
    num_left = num_groups - 1
    counts = []
    for fraction, part in ((config.val_fraction, "validation"), (config.test_fraction, "test")):
        # Leave one group for the test, if there is one.
        spared = 1 if part == "validation" and config.test_fraction else 0
        wanted = min(max(1, round(fraction * num_groups)), num_left - spared) if fraction else 0
        counts.append(max(0, wanted))
        num_left -= counts[-1]
    return counts[0], counts[1]


def on_other_ranks(config: TrainConfig, num_before: int, num_now: int) -> tuple[dict[str, Any], str]:
    """Return (the settings that change when a run goes on with another number of ranks, a sentence about its
    steps).

    No rank takes more samples at once than before, because its memory may hold no more: the rest is
    accumulated over micro-batches.

    Args:
        config: the settings on the ranks from before.
        num_before: their number.
        num_now: the number of ranks from now on.
    """
    if "batch_size" in config.UNUSED:
        return {}, ""
    wanted = config.samples_per_step(num_before)
    per_rank = max(1, round(wanted / num_now))
    batch_size = next(size for size in range(min(config.batch_size, per_rank), 0, -1) if per_rank % size == 0)
    changes: dict[str, Any] = {"batch_size": batch_size, "accumulate": per_rank // batch_size}
    if config.global_batch_size is not None:
        changes["global_batch_size"] = None
    as_before = (
        f"A step has {wanted} samples as before"
        if per_rank * num_now == wanted
        else f"{wanted} samples of a step do not divide among {count_of_ranks(num_now)}: a step has {per_rank * num_now} now"
    )
    return changes, f"{as_before}, with batch_size={batch_size} and accumulate={per_rank // batch_size}."
