"""The target of a reconstruction: the descriptors of data, measured or read from a file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.machine.files import write_whole
from nbgpu.recipes.microstructure import mcrpy_files
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS, characterize
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.files import load_fields
from nbgpu.recipes.microstructure.grids import decided, indicated
from nbgpu.recipes.microstructure.measure import NUM_DIRECTIONS, S2, Measure
from nbgpu.recipes.microstructure.sample import micrograph
from nbgpu.recipes.microstructure.structure import Structure, mean_structure, structures

_GENERATED_SHAPE = (128, 128)
_SHAPE_FOR_GENERATED = (32, 32, 32)
_MIN_CORRELATION_LENGTHS = 5
"""A field whose shortest axis has fewer correlation lengths than this gets a warning."""
_MEASURE_KEYS = ("limit_to", "periodic")


@dataclass(frozen=True)
class Target:
    """The descriptors that a reconstruction has to match, one set for all directions or one for each, with
    the number of phases and the shape of the field to find."""

    descriptors: Sequence[Mapping[str, Tensor]]
    """Descriptors (P', levels, *shape), always including the two-point correlation."""
    measure: Measure
    num_phases: int
    """P of the field to be found."""
    shape: tuple[int, ...]
    """The shape of the field to be found."""
    summary: str
    phases: Tensor | None = None
    """The phases of the data; None if only descriptors were given."""
    structure: Sequence[Structure] = ()
    """The structure by which a result is judged, for each direction or for all; empty where the data are a
    file of descriptors without it."""
    compared: Sequence[str] = ()
    """The descriptors that the loss compares; empty for all."""

    @property
    def levels(self) -> int:
        """The number of grids on which all compared descriptors were measured."""
        names = self.compared or self.descriptors[0].keys()
        return min(one[name].shape[1] for one in self.descriptors for name in names)

    @property
    def shares(self) -> Tensor:
        """The share of each phase, (P,), or (2,) for P = 1: the correlations at lag 0, as a mean over the
        directions."""
        middle = self.measure.limit_to - 1
        shares = torch.stack([t[S2][:, 0, middle, middle] for t in self.descriptors]).mean(dim=0)
        return torch.stack([1 - shares[0], shares[0]]) if self.num_phases == 1 else shares

    @property
    def covariances(self) -> list[Tensor]:
        """The covariance along an axis of each phase whose indicator the field has, for distances from 0 to
        limit_to - 1 pixels and divided by its value at 0; a mean over axes and directions."""
        middle = self.measure.limit_to - 1
        covariances = []
        for s2 in torch.stack([t[S2][:, 0] for t in self.descriptors]).mean(dim=0):
            # At lag 0 the correlation is the share of the phase, whose indicator has this mean.
            share = float(s2[middle, middle])
            along_axis = (s2[middle:, middle] + s2[middle, middle:]) / 2
            covariances.append((along_axis - share**2) / max(share - share**2, 1e-12))
        return covariances

    @property
    def correlation_lengths_px(self) -> list[float]:
        """The correlation length of each phase whose indicator the field has: the distance along an axis, in
        pixels, at which the covariance falls to 1 / e of the variance; limit_to - 1 where it does not fall so
        far."""
        return [_first_fall(covariance.numpy(), 1 / np.e) for covariance in self.covariances]

    @property
    def warnings(self) -> list[str]:
        """A sentence about a field that is too small for its statistics to be representative, if it is."""
        length, shortest = max(self.correlation_lengths_px), min(self.shape)
        if shortest >= _MIN_CORRELATION_LENGTHS * length:
            return []
        at_least = "at least " if length >= self.measure.limit_to - 1 else ""
        return [
            f"the shortest axis, {shortest} pixels, is less than {_MIN_CORRELATION_LENGTHS} correlation lengths of {at_least}{length:.1f} pixels: so "
            "small a field has few independent parts, and its statistics are a matter of chance. Take a larger shape"
        ]


def _first_fall(values: np.ndarray, level: float) -> float:
    """Return the index at which values (N,) first fall to a level, interpolated linearly; N - 1 if they stay
    above it, 0 if they are below it from the start, as the covariance of a field of one phase is."""
    below = np.flatnonzero(values < level)
    if not len(below):
        return float(len(values) - 1)
    after = int(below[0])
    if after == 0:
        return 0.0
    return float(after - 1 + (values[after - 1] - level) / (values[after - 1] - values[after]))


def holds_descriptors(data: str) -> bool:
    """Return whether the setting `data` names a file of descriptors, not microstructures."""
    return data.endswith((".npz", *mcrpy_files.SUFFIXES))


def build_measure(config: MicrostructureConfig) -> Measure:
    return Measure(config.limit_to, config.periodic, config.gram_network)


def load_target(config: MicrostructureConfig, only_measured: Sequence[str] = ()) -> Target:
    """Read the file of descriptors or of a microstructure that the settings name, or generate a picture, and
    measure it where needed.

    Args:
        config: the settings.
        only_measured: descriptors to measure besides those of the settings; they need not be differentiable.

    Raises:
        DataError: lists every problem of the files, one per line.
    """
    names = list(dict.fromkeys([*config.descriptor_types, *only_measured, S2]))
    if config.data.endswith(mcrpy_files.SUFFIXES):
        return _from_mcrpy(config, [*config.descriptor_types, *only_measured])
    if holds_descriptors(config.data):
        return _from_descriptors(config, names)
    measure = build_measure(config)
    if config.data == "generated":
        sizes = tuple(max(length, 2 * config.limit_to) for length in _GENERATED_SHAPE)
        fractions = config.generated_fractions
        phases = micrograph(sizes, config.generated_correlation_length, fractions, config.seed)
        fields = [indicated(phases, len(fractions) + 1 if config.multiphase else 1)]
        origin = (
            f"a generated picture of {_words(sizes)}, phases {', '.join(f'{f:g}' for f in fractions)} of it"
        )
    else:
        fields, notes = load_fields(config.data, names, measure, config.multiphase, config.threshold)
        origin = "; ".join([f"{_words(fields[0].shape[1:])} pixels from {config.data}", *notes])
    return Target(
        _measured(config, fields, names, measure),
        measure,
        num_phases=len(fields[0]),
        shape=_shape(config, tuple(fields[0].shape[1:])),
        summary=f"{origin}; descriptors {', '.join(config.descriptor_types)}",
        phases=decided(fields[0]),
        structure=_structure(config, fields),
        compared=config.descriptor_types,
    )


def _structure(config: MicrostructureConfig, fields: Sequence[Tensor]) -> list[Structure]:
    """Measure the structure of fields (P, ...), for each direction or, if the settings are isotropic, as one
    mean."""
    parts = [
        part
        for field in fields
        for part in structures(decided(field), max(2, len(field)), config.limit_to, config.periodic)
    ]
    return [mean_structure(parts)] if config.isotropic else parts


def _measured(
    config: MicrostructureConfig, fields: Sequence[Tensor], names: Sequence[str], measure: Measure
) -> list[dict[str, Tensor]]:
    """Measure the descriptors of fields (P, ...): one set for each direction of a volume or for each picture,
    or one mean over the directions if the settings are isotropic."""
    sets = [characterize(field, names, measure, multigrid=config.multigrid_descriptor) for field in fields]
    if fields[0].ndim == 4:
        sets = [{name: values[d] for name, values in sets[0].items()} for d in range(NUM_DIRECTIONS)]
    return _mean(sets) if config.isotropic else sets


def _shape(config: MicrostructureConfig, data_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the field to find: the setting `shape`, else the shape of the data, to which
    `add_dimension` gives a picture a third axis; for generated data, a fixed volume."""
    if config.shape:
        return config.shape
    if config.data == "generated":
        data_shape = tuple(max(length, 2 * config.limit_to) for length in _SHAPE_FOR_GENERATED)
        return data_shape if config.add_dimension is None else (*data_shape[:2], config.add_dimension)
    if config.add_dimension is None:
        return data_shape
    if len(data_shape) == 3:
        raise DataError(
            f"{config.data}: is a volume already, and add_dimension is for pictures. Leave it out"
        )
    return (*data_shape, config.add_dimension)


def save_descriptors(path: Path, target: Target) -> None:
    """Write all descriptors as `direction_0/NAME` and so on and the structure as `structure_0/NAME`, beside
    limit_to, periodic, num_phases and the shape. The file is written whole or not at all."""
    arrays = {
        f"direction_{direction}/{name}": values.numpy()
        for direction, descriptors in enumerate(target.descriptors)
        for name, values in descriptors.items()
    }
    for direction, part in enumerate(target.structure):
        arrays |= {f"structure_{direction}/{name}": values.numpy() for name, values in vars(part).items()}
    content = io.BytesIO()
    np.savez(
        content,
        allow_pickle=False,
        limit_to=np.array(target.measure.limit_to),
        periodic=np.array(target.measure.periodic),
        num_phases=np.array(target.num_phases),
        shape=np.array(target.shape),
        **arrays,
    )
    write_whole(path, content.getvalue())


def _from_descriptors(config: MicrostructureConfig, names: Sequence[str]) -> Target:
    """Read the target from a descriptors.npz of an earlier run or of `nbgpu characterize`.

    Raises:
        DataError: the file is damaged, or was measured with other parameters, phases or descriptors than the
            settings'; the message lists all differences.
    """
    try:
        with np.load(config.data, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{config.data}: cannot be read as descriptors: {error}") from None
    if lacking := [name for name in (*_MEASURE_KEYS, "num_phases", "shape") if name not in arrays]:
        raise DataError(f"{config.data}: is not a descriptors.npz of a run: it lacks {', '.join(lacking)}")
    # The parameters of the measurement, the phases and the descriptors must agree with the settings.
    problems = [
        f"{name} is {arrays[name].item()!r} there, and {getattr(config, name)!r} in the settings"
        for name in _MEASURE_KEYS
        if arrays[name].item() != getattr(config, name)
    ]
    num_phases = int(arrays["num_phases"])
    problems += _phase_problems(config, num_phases)
    keys = [key.partition("/") for key in arrays if key.startswith("direction_")]
    num_directions = len({direction for direction, _, _ in keys})
    saved = {name for _, _, name in keys}
    if lacking := [name for name in names if name not in saved]:
        problems.append(
            f"it lacks {', '.join(lacking)}, and has {', '.join(sorted(saved & set(DESCRIPTORS)))}"
        )
    if problems:
        raise DataError("\n".join(f"{config.data}: {problem}" for problem in problems))
    tensors = {key: torch.from_numpy(values) for key, values in arrays.items() if "/" in key}
    structure = [
        Structure(tensors[f"structure_{direction}/lineal_path"], tensors[f"structure_{direction}/cluster"])
        for direction in range(sum(key.endswith("/lineal_path") for key in tensors))
    ]
    descriptors = [
        {name: tensors[f"direction_{direction}/{name}"] for name in names}
        for direction in range(num_directions)
    ]
    return Target(
        _reduced(config, descriptors),
        build_measure(config),
        num_phases if config.multiphase else 1,
        _shape(config, tuple(int(length) for length in arrays["shape"])),
        summary=f"descriptors {', '.join(config.descriptor_types)} from {config.data}",
        structure=[mean_structure(structure)] if config.isotropic and structure else structure,
        compared=config.descriptor_types,
    )


def _from_mcrpy(config: MicrostructureConfig, names: Sequence[str]) -> Target:
    """Read the target from a .pickle that MCRpy's `characterize` or `match` has saved.

    Raises:
        DataError: a line for each problem of the file.
    """
    measure = build_measure(config)
    saved = mcrpy_files.read(config.data, names, measure)
    problems = _phase_problems(config, saved.num_phases)
    if saved.shape is None and not config.shape:
        problems.append("does not say how large the field was. Give the shape that is looked for, as shape")
    if problems:
        raise DataError("\n".join(f"{config.data}: {problem}" for problem in problems))
    origin = f"descriptors {', '.join(config.descriptor_types)} of MCRpy from {config.data}"
    return Target(
        _reduced(config, saved.descriptors),
        measure,
        saved.num_phases if config.multiphase else 1,
        _shape(config, saved.shape or ()),
        summary="; ".join([origin, *saved.notes]),
        compared=config.descriptor_types,
    )


def _phase_problems(config: MicrostructureConfig, num_phases: int) -> list[str]:
    """Return a phrase if the phases of a file of descriptors do not fit the setting `multiphase`."""
    if num_phases == 1 and config.multiphase:
        return ["it has the second of two phases alone, and multiphase is True"]
    if num_phases > 2 and not config.multiphase:
        return [f"it has {num_phases} phases, and multiphase is False"]
    return []


def _reduced(
    config: MicrostructureConfig, sets: Sequence[Mapping[str, Tensor]]
) -> Sequence[Mapping[str, Tensor]]:
    """Reduce the descriptors of a file to what the settings would have measured: without `multiphase` the
    second phase alone, without `multigrid_descriptor` the full grid alone, and with `isotropic` the mean over
    the directions."""
    phases = slice(None) if config.multiphase else slice(-1, None)
    levels = slice(None) if config.multigrid_descriptor else slice(1)
    sets = [{name: values[phases, levels] for name, values in one.items()} for one in sets]
    return _mean(sets) if config.isotropic else sets


def _mean(sets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the mean over the directions, on the levels that all directions have."""
    mean = {}
    for name in sets[0]:
        levels = min(one[name].shape[1] for one in sets)
        mean[name] = torch.stack([one[name][:, :levels] for one in sets]).mean(dim=0)
    return [mean]


def _words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
