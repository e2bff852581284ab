"""What an epoch comes to over ranks and steps, and how many worker processes there are, in numbers and
words."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.config import TrainConfig, train_config
from nbgpu.planning.epochs import DataAmount, epoch_of, epoch_of_samples, epochs_in_words, share_of
from nbgpu.planning.workers import MIN_SHARED_BYTES, HostResources, workers_for


@pytest.mark.slow
@pytest.mark.parametrize("num_volumes", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("per_volume", [1, 3])
@pytest.mark.parametrize("per_step", [(1, 1), (2, 1), (2, 2), (5, 1)])
def test_no_sample_is_lost_or_counted_twice(
    num_volumes: int, world_size: int, per_volume: int, per_step: tuple[int, int]
) -> None:
    """taken = all + repeated - left out, whatever the numbers are; padded leaves none out, uneven repeats
    none."""
    batch_size, accumulate = per_step
    for shards in ("padded", "uneven"):
        config = TrainConfig(batch_size=batch_size, accumulate=accumulate, shards=shards)
        epoch = epoch_of(config, DataAmount(num_volumes, per_volume), world_size)
        num_taken = epoch.num_steps * batch_size * accumulate * world_size
        assert num_taken == num_volumes * per_volume + epoch.num_repeated - epoch.num_left_out
        assert epoch.num_repeated < num_taken
        if shards == "padded":
            assert epoch.num_left_out == 0
            assert len(set(epoch.shard_sizes)) == 1
        elif num_volumes // world_size * per_volume >= batch_size * accumulate:
            assert epoch.num_repeated == 0
            assert sum(epoch.shard_sizes) == num_volumes


@pytest.mark.parametrize(
    ("settings", "num_volumes", "said"),
    [
        (
            {"batch_size": 2},
            8,
            [
                "8 volumes over 2 ranks: 4 on each",
                "CacheDataset: a rank keeps 4 of its 4 volumes decoded in host memory",
                "an epoch has 2 steps of 4 samples and uses every sample exactly once",
            ],
        ),
        (
            {"batch_size": 3, "dataset": "plain"},
            7,
            [
                "7 volumes over 2 ranks: 4 on each; 1 of them on two ranks, so that all have as many",
                "Dataset: every volume is decoded each time that it is used",
                "an epoch has 2 steps of 6 samples; 5 of its 12 samples are repeats",
            ],
        ),
        (
            {"batch_size": 2, "shards": "uneven", "cache_rate": 0.5},
            7,
            [
                "7 volumes over 2 ranks: 1 rank has 4, the others 3",
                "CacheDataset: a rank keeps 2 of its 4 volumes decoded in host memory, and decodes the others each "
                "time that they are used",
                "an epoch has 1 step of 4 samples; 3 are left out, other ones each time",
            ],
        ),
        (
            {"batch_size": 1, "cache_rate": 0.5, "replace_rate": 0.3},
            12,
            [
                "12 volumes over 2 ranks: 6 on each",
                "SmartCacheDataset: an epoch uses the 3 of 6 volumes that a rank has in memory; 1 of them gives way to "
                "the next after each epoch",
                "an epoch has 3 steps of 2 samples and uses each of these exactly once",
            ],
        ),
        (
            {"dataset": "persistent", "cache_dir": "here", "batch_size": 1},
            1,
            [
                "1 volume over 2 ranks: fewer than ranks, so each rank takes all of them and draws its own samples",
                "PersistentDataset: every volume is decoded once, and read from here from then on",
                "an epoch has 1 step of 2 samples; 1 of its 2 samples are repeats",
            ],
        ),
    ],
)
def test_an_epoch_is_told_in_words(settings: dict[str, Any], num_volumes: int, said: list[str]) -> None:
    assert list(epoch_of(TrainConfig(**settings), DataAmount(num_volumes, 1), 2).words) == said


def test_held_out_volumes_are_named() -> None:
    config = TrainConfig()
    assert (
        epoch_of(config, DataAmount(10, 4, 2), 2).words[0]
        == "10 volumes over 2 ranks: 5 on each; 2 more are held out"
    )
    assert epoch_of(config, DataAmount(4, 1, 1), 1).words[0] == "4 volumes on one rank; 1 more is held out"
    assert epoch_of_samples(config, DataAmount(8, 1, 2), 1)[1][0].endswith("each time; 2 more are held out")


def test_many_epochs_are_told_as_a_person_writes_them() -> None:
    assert [epochs_in_words(n) for n in (1 / 3, 12.5, 1250.0, 25000.4)] == ["0.333", "12.5", "1250", "25000"]


def test_a_share_is_what_a_person_counts() -> None:
    for percent in range(1, 101):
        assert share_of(100, percent / 100) == percent
    assert share_of(3, 0.5) == 2


@pytest.mark.parametrize(
    ("settings", "host", "count", "said"),
    [
        ({"num_workers": 3}, HostResources(2, 2, 0), 3, "as the settings say"),
        ({}, HostResources(64, 2, None), 0, "all volumes are decoded in memory"),
        ({"dataset": "plain", "transforms_on": "gpu"}, HostResources(64, 2, None), 0, "thread of the rank"),
        ({"cache_rate": 0.5, "replace_rate": 0.5}, HostResources(64, 2, None), 0, "threads of its own"),
        ({"dataset": "plain"}, HostResources(64, 8, 64 * 1024**2), 0, "/dev/shm has 64 MiB"),
        ({"dataset": "plain"}, HostResources(2, 2, None), 0, "2 cores for 2 ranks leave none for workers"),
        (
            {"cache_rate": 0.5},
            HostResources(8, 2, MIN_SHARED_BYTES),
            3,
            "8 cores for 2 ranks leave 3 for each",
        ),
        (
            {"dataset": "persistent"},
            HostResources(64, 1, None),
            4,
            "leave 63 for each rank's workers, of which 4",
        ),
    ],
)
def test_workers_are_chosen_with_a_reason(
    settings: dict[str, Any], host: HostResources, count: int, said: str
) -> None:
    chosen = workers_for(TrainConfig(**settings), host)
    assert chosen.count == count
    assert said in chosen.reason


def test_masks_and_cases_are_called_by_their_names() -> None:
    for recipe, said in {"lithography": "8 masks over 2 ranks", "diffusion": "8 cases over 2 ranks"}.items():
        words = epoch_of(train_config(recipe), DataAmount(8, 1), 2).words
        assert words[0].startswith(said)
        assert not any("volume" in sentence for sentence in words)


def test_a_rank_with_one_of_them_keeps_its_only_one() -> None:
    words = epoch_of(train_config("lithography"), DataAmount(1, 1), 2).words
    assert "CacheDataset: a rank keeps its only mask decoded in host memory" in words
