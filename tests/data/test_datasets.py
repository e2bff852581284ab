"""The datasets give the same samples however they keep the volumes; what they keep is what they say."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from pairs import AUGMENTED, EDGE, assert_same, loader, numbers, write
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.engine.data.datasets import PackedVolumes
from nbgpu.engine.data.loader import SampleLoader
from nbgpu.engine.data.sampling import augmentation
from nbgpu.errors import DataError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write(tmp_path)


def num_read(files: list[Path]) -> int:
    """How often a file was decoded since this was asked last."""
    log = files[0].parent / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return len(lines)


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "plain"},
        {"dataset": "cache", "cache_rate": 0.5},
        {"dataset": "persistent"},
        {"dataset": "plain", "transforms_on": "gpu"},
    ],
    ids=str,
)
def test_all_datasets_give_the_same_batches_to_the_last_bit(
    files: list[Path], settings: dict[str, Any]
) -> None:
    expected, found = loader(files, **AUGMENTED), loader(files, **AUGMENTED, **settings)
    for _ in range(2):
        assert_same(expected, found)
    expected.close()
    found.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "plain"},
        {"dataset": "persistent"},
        {"cache_rate": 0.5},
        {"cache_rate": 0.5, "replace_rate": 0.5},
    ],
    ids=str,
)
def test_a_step_that_is_sought_has_the_batches_that_it_always_had(
    files: list[Path], settings: dict[str, Any]
) -> None:
    straight = loader(files, **AUGMENTED, **settings)
    batches = []
    for _ in range(3):
        batches += list(straight)
        straight.next_epoch()
    straight.close()
    sought = loader(files, **AUGMENTED, **settings)
    for step in [*range(len(batches)), *reversed(range(len(batches)))]:
        sought.seek(step)
        first = next(iter(sought))
        assert all(torch.equal(first[name], batches[step][name]) for name in first)
    sought.close()


def test_each_dataset_decodes_as_often_as_it_says(files: list[Path]) -> None:
    found = {}
    for name, settings in {
        "plain": {"dataset": "plain"},
        "half": {"cache_rate": 0.5},
        "cache": {},
        "persistent": {"dataset": "persistent"},
        "persistent again": {"dataset": "persistent"},
    }.items():
        batches = loader(files, batch_size=1, **settings)
        at_first = num_read(files)
        for _ in range(2):
            assert len(list(batches)) == 7
        found[name] = (at_first, num_read(files))
    assert found == {
        "plain": (0, 14),
        "half": (4, 2 * 3),
        "cache": (7, 0),
        "persistent": (0, 7),
        "persistent again": (0, 0),
    }


def test_the_persistent_cache_is_not_used_for_other_files_or_steps_or_when_it_is_damaged(
    files: list[Path],
) -> None:
    def image_of_0(**changes: Any) -> tuple[Tensor, int]:
        batches = list(loader(files[:1], batch_size=1, dataset="persistent", **changes))
        return batches[0]["image"], num_read(files)

    first, _ = image_of_0()
    louder, num = image_of_0(gain=3.0)
    assert num == 1
    torch.testing.assert_close(louder, 3 * first)

    cached = [
        path
        for path in (files[0].parent / "cache").iterdir()
        if torch.equal(torch.load(path)["image"], first[0])
    ]
    content = cached[0].read_bytes()
    for damage in (b"", content[:100], content[: len(content) // 2], b"x" * len(content)):
        cached[0].write_bytes(damage)
        again, num = image_of_0()
        assert (num, torch.equal(again, first)) == (1, True)
    assert image_of_0()[1] == 0

    torch.save(torch.ones(1, EDGE, EDGE, EDGE), files[0])
    changed, num = image_of_0()
    assert num == 1
    assert float(changed.mean()) == 1


def test_a_persistent_cache_that_cannot_be_written_says_so(files: list[Path], small_disk: Any) -> None:
    full = small_disk(4096)
    with pytest.raises(DataError, match=rf"cannot be kept in cache_dir={full} \(.*No space left.*Make room"):
        list(loader(files, dataset="persistent", cache_dir=str(full)))
    assert not list(full.glob("*.partial"))
    gone = loader(files, dataset="persistent", cache_dir=str(full / "gone"))
    (full / "gone").rmdir()
    with pytest.raises(DataError, match=rf"cannot be kept in cache_dir={full / 'gone'} \(.*No such file"):
        list(gone)
    with pytest.raises(DataError, match="cache_dir=/proc/nowhere: the folder cannot be made"):
        loader(files, dataset="persistent", cache_dir="/proc/nowhere")


def names_in_cache(batches: SampleLoader) -> list[str]:
    """The names of the volumes that SmartCacheDataset has in memory now."""
    return [str(batches._shard[index]["name"]) for index in range(len(batches._shard))]


@pytest.mark.parametrize(
    ("cache_rate", "replace_rate", "num_cached", "num_replaced"),
    [
        (0.5, 0.25, 4, 1),
        (0.5, 0.5, 4, 2),
        (0.5, 1.0, 4, 3),  # no more than there are outside
        (0.28, 1.0, 2, 2),
        (0.14, 0.1, 1, 1),
    ],
)
def test_the_smart_cache_replaces_what_it_says(
    files: list[Path], cache_rate: float, replace_rate: float, num_cached: int, num_replaced: int
) -> None:
    batches = loader(files, batch_size=1, cache_rate=cache_rate, replace_rate=replace_rate)
    assert (
        f"uses the {num_cached} of 7 volumes that a rank has in memory; {num_replaced} of them"
        in batches.summary[1]
    )
    num_epochs = 15
    held = [names_in_cache(batches)]
    num_uses: Counter[int] = Counter()
    for _ in range(num_epochs):
        seen = numbers(batches)
        assert seen == Counter(int(name) for name in held[-1])  # each of them, once
        num_uses += seen
        batches.next_epoch()
        held.append(names_in_cache(batches))
    batches.close()
    for before, after in itertools.pairwise(held):
        assert len(set(before)) == len(before) == num_cached
        assert len(set(before) - set(after)) == num_replaced
    # All take their turn, for as long.
    assert len(num_uses) == 7
    assert max(num_uses.values()) - min(num_uses.values()) <= -(-num_cached // num_replaced)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_shards_repeat_nothing_and_leave_out_other_volumes_each_time(
    files: list[Path], num_ranks: int
) -> None:
    ranks = [
        loader(files, rank=rank, world_size=num_ranks, shards="uneven", batch_size=1)
        for rank in range(num_ranks)
    ]
    assert len({batches.steps_per_epoch for batches in ranks}) == 1
    left_out = []
    for _ in range(8):
        seen: Counter[int] = sum((numbers(batches) for batches in ranks), Counter())
        assert set(seen.values()) == {1}
        left_out.append(frozenset(range(7)) - set(seen))
        assert len(left_out[-1]) == 7 % num_ranks
    assert len(set(left_out)) > 1
    assert frozenset().union(*left_out) > left_out[0]


def test_images_of_a_pair_are_turned_together_and_only_the_images_intensities_change(
    files: list[Path],
) -> None:
    plain = {
        int(number): batch["target"][0] for batch in loader(files, batch_size=1) for number in batch["number"]
    }
    turned = loader(files, batch_size=1, rotate90_prob=1.0, flip_prob=0.5)
    for batch in turned:
        torch.testing.assert_close(2 * batch["image"], batch["target"])
        original = plain[int(batch["number"])]
        assert not torch.equal(batch["target"][0], original)
        torch.testing.assert_close(batch["target"][0].flatten().sort()[0], original.flatten().sort()[0])
    for batch in loader(files, batch_size=1, intensity_prob=1.0, intensity_strength=0.3):
        assert torch.equal(batch["target"][0], plain[int(batch["number"])])
        factors = (batch["image"][0] - plain[int(batch["number"])] / 2).abs()
        assert 0 < float(factors.max()) <= 0.3 + 0.3


def test_augmentation_turns_only_in_planes_of_equal_edges() -> None:
    config = train_config("autoencoder", rotate90_prob=1.0)
    sample = {"image": torch.rand(1, 4, 4, 3)}
    for seed in range(5):
        augment = augmentation(config, ["image"], (4, 4, 3))
        augment.set_random_state(seed)
        assert augment(sample)["image"].shape == (1, 4, 4, 3)
    assert not augmentation(config, ["image"], (4, 3)).transforms


def test_packed_volumes_are_the_same_memory_in_another_process_or_none() -> None:
    volumes = [
        {"name": "a", "x": torch.rand(3, 5), "y": torch.tensor(7)},
        {"name": "b", "x": torch.zeros(0, 2)},
    ]
    packed = PackedVolumes(volumes)
    copy = pickle.loads(pickle.dumps(packed))
    for one in (packed, copy):
        assert [v["name"] for v in (one[0], one[1])] == ["a", "b"]
        assert torch.equal(one[0]["x"], volumes[0]["x"])
        assert (int(one[0]["y"]), one[1]["x"].shape) == (7, (0, 2))
    assert len(pickle.dumps(packed)) < 1000
    copy[0]["x"].zero_()
    assert torch.equal(packed[0]["x"], volumes[0]["x"])


@pytest.mark.gpu
def test_batches_are_pinned_or_made_on_the_gpu(files: list[Path]) -> None:
    expected = list(loader(files, **AUGMENTED))
    for settings, pinned, place in (
        ({}, True, "cpu"),
        ({"pin_memory": "off"}, False, "cpu"),
        ({"transforms_on": "gpu"}, False, "cuda"),
    ):
        batches = loader(files, device="cuda:0", **AUGMENTED, **settings)
        for batch, same in zip(batches, expected, strict=True):
            assert batch["image"].is_pinned() == pinned
            assert batch["image"].device.type == place
            torch.testing.assert_close(batch["image"].cpu(), same["image"])
        batches.close()


def test_the_cache_is_filled_by_as_many_threads_as_the_settings_say(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3)
    read = pairs.Read.__call__

    def read_with_two_others(self: pairs.Read, item: Any) -> Any:
        together.wait(timeout=30)
        return read(self, item)

    monkeypatch.setattr(pairs.Read, "__call__", read_with_two_others)
    assert torch.get_num_threads() < 3
    loader(files[:3], cache_threads=3, batch_size=1).close()
    assert num_read(files) == 3
