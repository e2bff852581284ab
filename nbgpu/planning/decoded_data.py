"""An estimate of the memory that the decoded data of a run take, made without torch and from a few files.

For generated data the memory follows from the settings. For files it is estimated from their names, some
headers, and the voxels of one or two files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nbgpu.config import TrainConfig
from nbgpu.errors import DataError, NbgpuError
from nbgpu.machine.files import files_below
from nbgpu.planning.csv_rows import read_csv
from nbgpu.planning.epochs import DataAmount, epoch_of, held_out
from nbgpu.planning.volume_files import READ_ERRORS, VolumeList, find_volumes
from nbgpu.planning.workers import HostResources, workers_for
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.diffusion.config import DiffusionConfig
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.text.sizes import in_words

MAX_HEADERS = 64
MAX_READ = 2
_MAX_READ_VOXELS = 2**26
"""The most files whose headers are read, the most whose voxels are read, and the most voxels of these. They
are small because the files are read in the notebook's kernel, which runs plain cells as well."""
_FLOAT_BYTES = 4
_INDEX_BYTES = 4
"""The autoencoder keeps with each volume the index of each bright voxel, around which it draws patches."""
_MNI152_BYTES = 24_601_715
"""The size of nilearn's template at 1 mm without its margins, with the indices of its bright voxels."""
_ONE_OF_A_CASE = re.compile(r"(?!.*_ce-)[^.].*[-_](t1n|t1|t1w)\.nii(\.gz)?", re.IGNORECASE)
"""The names of T1 images without contrast. Each case of BraTS has one, so that the cases can be counted by
them."""


class UnknownError(NbgpuError):
    """The memory cannot be estimated before the ranks read the data; the message says why."""


@dataclass(frozen=True)
class DecodedData:
    """The number and size of the decoded training volumes of a run."""

    num_volumes: int
    """The training volumes of all ranks, each counted once."""
    volume_bytes: float
    """The mean size of a decoded volume."""
    basis: str = ""
    """The files on which the estimate is based, as a phrase; empty if the numbers follow from the
    settings."""


@dataclass(frozen=True)
class MemoryFit:
    """Whether the decoded data fit into the memory of a host."""

    words: str
    """A sentence about it for the user."""
    fits: bool
    """Whether the share of the data that the settings cache fits."""


def decoded_data(config: TrainConfig) -> DecodedData:
    """Estimate the number and size of the decoded training volumes.

    Raises:
        UnknownError: they are not known before the ranks read the data.
    """
    estimate = _ESTIMATES.get(type(config))
    if estimate is None:
        raise UnknownError("the recipe reads its data itself")
    try:
        return estimate(config)
    except DataError as error:
        raise UnknownError(str(error).splitlines()[0]) from None
    except OSError as error:
        raise UnknownError(f"{config.data} cannot be read: {error.strerror}") from None


def memory_fit(
    config: TrainConfig,
    data: DecodedData,
    host: HostResources,
    free_bytes: int,
    limit_bytes: int | None = None,
) -> MemoryFit:
    """Compare the memory of the decoded data with the memory that is free on a host.

    Args:
        config: the settings.
        data: the number and size of the volumes.
        host: the ranks that share the host, and its cores.
        free_bytes: the host memory that is free for all ranks together.
        limit_bytes: the memory that `memory_limit` allows all of them; None where there is none.
    """
    room = "that are free"
    if limit_bytes is not None and limit_bytes < free_bytes:
        free_bytes, room = limit_bytes, "that memory_limit allows"
    whole = _cached_bytes(config, data, host, rate=1.0)
    cached = _cached_bytes(config, data, host, rate=config.cache_rate)
    about = "about " if data.basis else ""
    basis = f" (estimated from {data.basis})" if data.basis else ""
    volumes = f"{config.VOLUME}s"
    if config.dataset_kind not in ("cache", "smart"):
        return MemoryFit(f"dataset={config.dataset_kind!r} keeps no {volumes} in memory", True)
    if whole <= free_bytes:
        every = (
            f"the only training {config.VOLUME}"
            if data.num_volumes == 1
            else f"all {data.num_volumes} training {volumes}"
        )
        amount = f"{about}{in_words(whole)} of the {in_words(free_bytes)} {room}"
        return MemoryFit(f"fits in memory: {every}, {amount}{basis}", True)
    # If only a part of the data is in memory, there are worker processes, which read the rest and share a
    # second copy of the cache; with all data in memory there are none. Any rate below 1 stands for a part.
    copies = _num_copies(config.model_copy(update={"cache_rate": 0.5}), host)
    whole *= copies / _num_copies(config.model_copy(update={"cache_rate": 1.0}), host)
    share = free_bytes / whole
    fitting = (
        f"{about}{math.floor(100 * share)} % of the {volumes}, {in_words(free_bytes)} of {in_words(whole)}"
    )
    if copies > 1:
        fitting += " (twice their size: worker processes have a copy; num_workers=0 does without)"
    sentence = f"fits in memory: {fitting}{basis}"
    if cached <= free_bytes:
        return MemoryFit(sentence, True)
    most = math.floor(100 * share) / 100
    return MemoryFit(f"{sentence}. {config.cache_rate:g} is too much: take {most:g} or less", False)


def _cached_bytes(config: TrainConfig, data: DecodedData, host: HostResources, rate: float) -> float:
    """Return the bytes of the volumes that all ranks of the host cache at this cache rate, with the copies of
    worker processes."""
    with_rate = config.model_copy(update={"cache_rate": rate})
    epoch = epoch_of(with_rate, DataAmount(data.num_volumes, 1), host.num_ranks)
    return _num_copies(with_rate, host) * sum(epoch.num_cached) * data.volume_bytes


def _num_copies(config: TrainConfig, host: HostResources) -> int:
    """Return the number of copies of a rank's cached volumes: the worker processes, if there are some, share
    a second one."""
    return 2 if workers_for(config, host).count else 1


# ---- recipes -------------------------------------------------------------------------------------------


def _autoencoder_data(config: AutoencoderConfig) -> DecodedData:
    """Estimate the data of the autoencoder: phantoms have the size of a patch, the template a constant size,
    and that of files is estimated from some of them."""
    training_share = 1 - config.val_fraction - config.test_fraction
    if config.data == "phantoms":
        count, num_left = config.num_phantoms, config.num_phantoms - 1
        num_val = min(round(config.val_fraction * count), num_left)
        num_test = min(round(config.test_fraction * count), num_left - num_val)
        return DecodedData(count - num_val - num_test, _FLOAT_BYTES * math.prod(config.patch))
    if config.data == "mni152":
        return DecodedData(1, training_share * _MNI152_BYTES, "the template's size")
    volumes = find_volumes(config.data)
    volume_bytes, basis = _mean_bytes(volumes.training, config)
    if len(volumes.training) == 1:
        # A single volume is divided into a part for training and the parts held out.
        return DecodedData(1, training_share * volume_bytes, basis)
    return DecodedData(_num_training(volumes, config), volume_bytes, basis)


def _num_training(volumes: VolumeList, config: AutoencoderConfig) -> int:
    """Return the number of training volumes that are left when patients are held out."""
    if volumes.validation or volumes.test or config.split:
        # A file named by `split` may hold out more volumes; it is not read here, so this is an upper bound.
        return len(volumes.training)
    patients = {volumes.patient_of(path, config.patient_pattern) for path in volumes.training}
    share_left = 1 - sum(held_out(len(patients), config)) / len(patients)
    return max(1, round(share_left * len(volumes.training)))


def _diffusion_data(config: DiffusionConfig) -> DecodedData:
    """Estimate the data of the diffusion recipe: cubes of four modalities, as many as there are cases by
    their names."""
    # Three modalities, and the one that is predicted from them.
    volume_bytes = 4 * _FLOAT_BYTES * config.edge**3
    if config.data == "phantoms":
        return DecodedData(config.num_phantoms - sum(held_out(config.num_phantoms, config)), volume_bytes)
    root = Path(config.data).expanduser()
    if not root.is_dir():
        raise UnknownError(f"there is no folder {root}")
    together = root / "imagesTr"
    if together.is_dir():
        count = sum(".nii" in path.name and not path.name.startswith(".") for path in together.iterdir())
    else:
        count = sum(_ONE_OF_A_CASE.fullmatch(path.name) is not None for path in files_below(root))
    if not count:
        raise UnknownError(f"{root} has no files that are named as those of BraTS")
    return DecodedData(max(1, count - sum(held_out(count, config))), volume_bytes, "the files' names")


def _survival_data(config: SurvivalConfig) -> DecodedData:
    """Estimate the data of the survival recipe: a volume of `image_size` for each training row of the
    table."""
    if config.left_to_data:
        raise UnknownError("image_size is left out, and is chosen by the files when a run begins")
    # A decoded patient has the volume and the features, and the int64 scalars order, event and number.
    volume_bytes = _FLOAT_BYTES * (math.prod(config.volume_shape) + len(config.features)) + 3 * 8
    if config.data == "generated":
        return DecodedData(config.num_patients - sum(held_out(config.num_patients, config)), volume_bytes)
    path = Path(config.data).expanduser()
    try:
        rows = [row for _, row in read_csv(path).rows]
    except DataError as error:
        raise UnknownError(str(error)) from None
    if config.fold:
        count = sum(row.get(config.fold, "").strip().lower().startswith("train") for row in rows)
    else:
        count = len(rows) - sum(held_out(len(rows), config))
    if count < 1:
        raise UnknownError(f"{path} has no row to train on")
    return DecodedData(count, volume_bytes, "the rows of the table")


def _lithography_data(config: LithographyConfig) -> DecodedData:
    """Return the data of the lithography recipe. Only for generated masks are they known beforehand."""
    if config.data != "generated":
        raise UnknownError("how many masks the files give is known when the ranks have read them")
    count = config.num_masks - sum(held_out(config.num_masks, config))
    # Each mask is stored with its image.
    return DecodedData(count, 2 * _FLOAT_BYTES * config.size**2)


_ESTIMATES: Mapping[type[TrainConfig], Callable[[Any], DecodedData]] = {
    AutoencoderConfig: _autoencoder_data,
    DiffusionConfig: _diffusion_data,
    SurvivalConfig: _survival_data,
    LithographyConfig: _lithography_data,
}


# ---- files ---------------------------------------------------------------------------------------------


def _mean_bytes(paths: Sequence[Path], config: AutoencoderConfig) -> tuple[float, str]:
    """Return (the mean bytes of a decoded volume, a phrase about the files from which it was estimated)."""
    looked_at = _spread(paths, MAX_HEADERS)
    mean_voxels = np.mean([_num_voxels(path, config) for path in looked_at])
    # Decoding cuts off empty margins and adds the indices of bright voxels, whose number only voxels show.
    to_read = [
        path for path in _spread(looked_at, MAX_READ) if math.prod(_opened(path).shape) <= _MAX_READ_VOXELS
    ]
    bytes_per_voxel = np.mean([_bytes_per_voxel(path, config) for path in to_read] or [_FLOAT_BYTES])
    headers = f"the headers of {len(looked_at)} of {len(paths)} files"
    basis = f"{headers} and the voxels of {len(to_read)}" if to_read else headers
    return float(mean_voxels * bytes_per_voxel), basis


def _spread(paths: Sequence[Path], most: int) -> list[Path]:
    """Return at most `most` of the files, evenly spread over the list."""
    num = min(most, len(paths))
    return [paths[(2 * index + 1) * len(paths) // (2 * num)] for index in range(num)]


def _num_voxels(path: Path, config: AutoencoderConfig) -> float:
    """Return the number of values of a volume with the channels and the voxel size of the settings, at least
    those of a patch."""
    import nibabel

    image = _opened(path)
    count = math.prod(image.shape[:3]) * config.num_image_channels
    if config.spacing_mm:
        count *= math.prod(nibabel.affines.voxel_sizes(image.affine)) / math.prod(config.spacing_mm)
    return float(max(count, math.prod(config.patch)))


def _bytes_per_voxel(path: Path, config: AutoencoderConfig) -> float:
    """Read a file, and return the bytes of the decoded volume, without empty margins and with the indices of
    bright voxels, divided by the number of values in the file's chosen channels."""
    try:
        values = np.asarray(_opened(path).dataobj, np.float32)
    except READ_ERRORS as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not values.size:
        raise DataError(f"{path}: has no voxels")
    values = values.reshape(*values.shape[:3], -1)
    if config.image_channels and max(config.image_channels) < values.shape[3]:
        values = values[..., list(config.image_channels)]
    # The box around all voxels above the minimum; a constant volume has none and stays whole.
    is_above = (values > values.min(axis=(0, 1, 2))).any(axis=3)
    box = tuple(
        slice(occupied[0], occupied[-1] + 1)
        for other_axes in ((1, 2), (0, 2), (0, 1))
        if len(occupied := np.flatnonzero(is_above.any(axis=other_axes)))
    )
    within = values[box]
    num_bright = int((within > within.mean(axis=(0, 1, 2))).any(axis=3).sum())
    return (within.size * _FLOAT_BYTES + num_bright * _INDEX_BYTES) / values.size


def _opened(path: Path) -> Any:
    """Open a NIfTI file for its header; DataError if it is damaged or has fewer than three dimensions."""
    # The import takes long, and generated data do not need it.
    import nibabel
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError

    try:
        image: Any = nibabel.load(path)
    except (*READ_ERRORS, ImageFileError, HeaderDataError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: cannot be read as NIfTI ({reason})") from None
    if len(image.shape) < 3:
        raise DataError(f"{path}: has {len(image.shape)} dimensions, and a volume needs three")
    return image
