"""Pairs of images in files, and what the tests do with loaders of them, here and on the ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from monai.transforms import Compose
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.loader import SampleLoader
from nbgpu.engine.data.parts import Parts
from nbgpu.engine.data.sampling import Draw, augmentation
from nbgpu.errors import DataError, RunError

EDGE = 6
NUM_FILES = 7
AUGMENTED = {"rotate90_prob": 0.5, "flip_prob": 0.5, "intensity_prob": 0.5}


class Read:
    """A pair of images and a number from a file; notes in `log` that it did."""

    def __init__(self, log: Path, gain: float = 1.0) -> None:
        self.log = log
        self.gain = gain

    def __call__(self, item: Item) -> dict[str, Tensor]:
        with self.log.open("a") as file:
            file.write(f"{item['name']}\n")
        image = torch.load(item["file"], weights_only=True) * self.gain
        return {"image": image, "target": 2 * image, "number": torch.tensor(int(item["name"]))}


def write(folder: Path) -> list[Path]:
    paths = [folder / f"{number}.pt" for number in range(NUM_FILES)]
    for number, path in enumerate(paths):
        torch.save(torch.rand(1, EDGE, EDGE, EDGE, generator=torch.Generator().manual_seed(number)), path)
    return paths


def loader(
    files: Sequence[Path],
    rank: int = 0,
    world_size: int = 1,
    gain: float = 1.0,
    device: str = "cpu",
    **settings: Any,
) -> SampleLoader:
    values = {"batch_size": 2, "num_workers": 0, **settings}
    if values.get("dataset") == "persistent":
        values.setdefault("cache_dir", str(files[0].parent / "cache"))
    config = train_config("autoencoder", **values)
    cube = (EDGE,) * 3
    return SampleLoader(
        Parts([{"name": str(number), "file": path} for number, path in enumerate(files)], [], []),
        Compose([Read(files[0].parent / "log", gain)]),
        Draw(["image", "target"], augment=augmentation(config, ["image", "target"], cube, ["image"])),
        config,
        rank=rank,
        world_size=world_size,
        device=torch.device(device),
    )


def numbers(epoch: Any) -> Counter[int]:
    """How often each file is in an epoch."""
    return Counter(number for batch in epoch for number in batch["number"].tolist())


def assert_same(expected: SampleLoader, found: SampleLoader) -> None:
    """One epoch of both is the same to the last bit."""
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys() == {"image", "target", "number"}
        assert all(torch.equal(one[name], other[name]) for name in one)


# ---- with worker processes -----------------------------------------------------------------------------


def worker_processes() -> list[psutil.Process]:
    """Those of this process: children of its forkserver."""
    found = []
    for child in psutil.Process().children():
        if "multiprocessing.forkserver" in " ".join(child.cmdline()):
            found += [p for p in child.children() if p.status() != psutil.STATUS_ZOMBIE]
    return found


def assert_no_worker_is_left() -> None:
    give_up_s = time.monotonic() + 300
    while left := worker_processes():
        assert time.monotonic() < give_up_s, f"left behind: {left}"
        time.sleep(0.05)


def assert_workers_change_nothing(files: Sequence[Path], rank: int, settings: dict[str, Any]) -> None:
    place = {"rank": rank, "world_size": 2, **AUGMENTED, **settings}
    alone, helped = loader(files, **place), loader(files, **place, num_workers=2)
    assert helped.summary[-1] == "2 worker processes for each rank: as the settings say"
    for _ in range(2):
        assert_same(alone, helped)
        alone.next_epoch()
        helped.next_epoch()
    stay = settings.get("persistent_workers") != "off" and "replace_rate" not in settings
    assert len(worker_processes()) == (2 if stay else 0)
    # Left in the middle, and sought.
    next(iter(helped))
    step = alone.steps_per_epoch * 2 + 1
    alone.seek(step)
    helped.seek(step)
    assert_same(alone, helped)
    alone.close()
    helped.close()
    assert_no_worker_is_left()


def what_a_killed_worker_gives(files: Sequence[Path]) -> tuple[int, str]:
    """The pid of a worker that was killed, and what the loader raised."""
    batches = loader(files, dataset="plain", num_workers=2, batch_size=1)
    try:
        taken = iter(batches)
        next(taken)
        victim = worker_processes()[0]
        victim.kill()
        list(taken)
        list(batches)
    except RunError as error:
        return victim.pid, str(error)
    finally:
        batches.close()
        assert_no_worker_is_left()
    raise AssertionError("the loader did not notice")


def what_a_bad_file_gives(files: Sequence[Path]) -> str:
    batches = loader(files, dataset="plain", num_workers=1)
    try:
        list(batches)
    except DataError as error:
        return str(error)
    finally:
        batches.close()
        assert_no_worker_is_left()
    raise AssertionError("the loader did not notice")


def what_a_lambda_gives(files: Sequence[Path]) -> str:
    batches = SampleLoader(
        Parts([{"name": "0", "file": files[0]}], [], []),
        Compose([lambda item: {"image": torch.load(item["file"])}]),
        Draw(),
        train_config("autoencoder", dataset="plain", num_workers=1),
    )
    try:
        list(batches)
    except RunError as error:
        return str(error)
    finally:
        batches.close()
    raise AssertionError("the loader did not notice")
