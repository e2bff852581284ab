"""The settings of the data and their way to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from nbgpu.config.conditions import Rules, given, left_out, one_of, only
from nbgpu.config.settings import Settings, control, divides_the_data, read_from, steered


class DataSettings(Settings):
    """From the files to the batches."""

    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("dataset", "auto", "cache", "smart"), "cache_rate", "cache_threads"),
        only(one_of("dataset", "persistent"), "cache_dir"),
        only(given("intensity_prob"), "intensity_strength"),
        only(left_out("val_every_epochs"), "val_every"),
        only(left_out("split"), "val_fraction", "test_fraction"),
    )

    VOLUME: ClassVar[str] = "volume"
    """The singular noun for one entry of the data in messages."""

    data: str = ""
    """where the samples come from; each recipe says what it takes"""
    dataset: Literal["auto", "plain", "cache", "smart", "persistent"] = Field(
        "auto", json_schema_extra=control("Data", "Dataset")
    )
    """MONAI's dataset. plain: Dataset, decodes the data each time; cache: CacheDataset, keeps the share
    cache_rate in memory; smart: SmartCacheDataset, also replaces the share replace_rate after each epoch;
    persistent: PersistentDataset, keeps the decoded data in cache_dir; auto: smart where replace_rate is
    above 0, else cache"""
    check_voxels: bool = True
    """read every file to its end before the first step, except files found good before; off: damage, NaN and
    the like show only at the step that reads them"""
    cache_rate: float = Field(
        1.0, ge=0, le=1, json_schema_extra=control("Data", "Cache rate") | steered("epoch")
    )
    """share of the rank's data kept decoded in host memory, so that a file is decoded only once"""
    replace_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        json_schema_extra=control("Data", "Replace rate", unit="per epoch") | steered("epoch"),
    )
    """share of the cache replaced after each epoch; a value above 0 takes SmartCacheDataset"""
    cache_threads: int | None = Field(None, ge=1, le=512)
    """threads of each rank that decode the data for MONAI's cache; left out: the rank's share of the cores
    that may be used, or threads_per_rank where that is less"""
    cache_dir: str = "nbgpu_cache"
    """folder of the decoded data; later runs with the same files and preparation use it again"""
    shards: Literal["padded", "uneven"] = "padded"
    """what to do where the samples do not divide evenly over ranks and steps. padded: every sample is used in
    every epoch, and some twice; uneven: no sample is used twice, and samples that do not fill a step are left
    out"""
    num_workers: int | None = Field(
        None, ge=0, le=64, json_schema_extra=control("Data", "Worker processes", unit="per rank")
    )
    """worker processes of each rank that read, decode, crop and augment; 0: a thread of the rank does it;
    left out: nbgpu chooses, and the run says why"""
    persistent_workers: Literal["auto", "on", "off"] = "auto"
    """keep worker processes from one epoch to the next; auto: on, except with SmartCacheDataset"""
    prefetch: int = Field(2, ge=1, le=64)
    """batches prepared ahead, and inputs given ahead to each worker process"""
    pin_memory: Literal["auto", "on", "off"] = "auto"
    """put batches into page-locked memory, which a GPU reads faster; auto: on where the rank has a GPU"""
    non_blocking: bool = True
    """let the copy of a batch to the GPU overlap with other work, as it can from pinned memory"""
    transforms_on: Literal["cpu", "gpu"] = "cpu"
    """where samples are cropped and augmented; gpu: in a thread of the rank (ToDeviced, ThreadDataLoader),
    with no worker processes"""
    rotate90_prob: float = Field(
        0.0, ge=0, le=1, json_schema_extra=control("Augmentation", "Rotate by 90 degrees")
    )
    """share of the samples that are turned by 90, 180 or 270 degrees in a random plane"""
    flip_prob: float = Field(0.0, ge=0, le=1, json_schema_extra=control("Augmentation", "Mirror"))
    """share of the samples that are mirrored, along each axis by itself"""
    intensity_prob: float = Field(
        0.0, ge=0, le=1, json_schema_extra=control("Augmentation", "Change intensities")
    )
    """share of the samples whose intensities are scaled, and share of those that are shifted"""
    intensity_strength: float = Field(0.1, ge=0, le=1)
    """largest change by intensity_prob: scaled by 1 - s to 1 + s, shifted by -s to s"""
    val_fraction: float = Field(0.2, ge=0, lt=1, json_schema_extra=divides_the_data())
    """share of the samples held out for validation"""
    test_fraction: float = Field(0.0, ge=0, lt=1, json_schema_extra=divides_the_data())
    """share of the samples that only the result at the end uses; 0 for none: the result then uses the
    validation samples"""
    split_seed: int = Field(0, ge=0, le=2**31 - 1, json_schema_extra=divides_the_data())
    """seed that decides which samples are held out, and what generated data look like; independent of seed"""
    split: str = Field("", json_schema_extra=divides_the_data() | read_from())
    """a .csv file with a name and a part (train, val or test) in each line, or a .json file with a list of
    names for each part; in place of val_fraction and test_fraction"""
    val_every: int = Field(50, ge=0, le=1_000_000, json_schema_extra=steered("step"))
    """steps between validations; 0 for none"""
    val_every_epochs: int = Field(0, ge=0, le=1_000_000, json_schema_extra=steered("step"))
    """epochs between validations, in place of val_every"""

    @property
    def validates(self) -> bool:
        """Whether the run has validations."""
        return bool(self.val_every or self.val_every_epochs)

    @property
    def dataset_kind(self) -> Literal["plain", "cache", "smart", "persistent"]:
        """The value of `dataset`, with 'auto' resolved."""
        if self.dataset != "auto":
            return self.dataset
        return "smart" if self.replace_rate > 0 else "cache"

    def problems(self) -> Iterator[str]:
        """Yield values of the dataset, its cache and its parts that do not go together."""
        if self.val_fraction + self.test_fraction >= 1:
            yield (
                f"val_fraction={self.val_fraction:g} and test_fraction={self.test_fraction:g} leave nothing to train on"
            )
        if self.replace_rate > 0 and self.cache_rate in (0, 1):
            keeps = f"every {self.VOLUME}" if self.cache_rate else "none"
            yield (
                f"replace_rate={self.replace_rate} replaces nothing while cache_rate={self.cache_rate:g} keeps "
                f"{keeps}; set cache_rate between 0 and 1, or replace_rate=0"
            )
        if self.replace_rate > 0 and self.dataset_kind != "smart":
            yield (
                f"replace_rate={self.replace_rate} is for dataset='smart', and dataset is {self.dataset!r}; set "
                "replace_rate=0, or dataset='auto'"
            )
        if self.dataset == "smart" and self.replace_rate == 0:
            yield "dataset='smart' replaces a share of its cache after each epoch; set replace_rate above 0"
        yield from self._problems_of_workers()

    def _problems_of_workers(self) -> Iterator[str]:
        """Yield values of the worker processes that do not go with the dataset or with the GPU."""
        if self.persistent_workers == "on" and self.dataset_kind == "smart":
            yield (
                "persistent_workers='on' does not go with SmartCacheDataset: workers that stay would go on with the "
                f"{self.VOLUME}s of the first epoch; leave it at 'auto'"
            )
        if self.persistent_workers == "on" and self.num_workers == 0:
            yield "persistent_workers='on' keeps nothing with num_workers=0; leave one of them out"
        if self.transforms_on == "gpu" and self.num_workers:
            yield (
                f"transforms_on='gpu' does not go with num_workers={self.num_workers}: each worker process would need "
                "the GPU for itself; leave num_workers out"
            )
        if self.transforms_on == "gpu" and self.pin_memory == "on":
            yield (
                "pin_memory='on' does not go with transforms_on='gpu': what is on the GPU cannot be pinned; leave "
                "pin_memory at 'auto'"
            )
