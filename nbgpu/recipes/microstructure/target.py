"""The target of a reconstruction: the descriptors of data, measured or read from a file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
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
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.sample import micrograph
from nbgpu.recipes.microstructure.structure import Structure, mean_structure, structures

_GENERATED_SHAPE = (128, 128)
_SHAPE_FOR_GENERATED = (32, 32, 32)
S2 = "FFTCorrelations"
"""Measured of every target, even if it is not to be matched: results are judged by it."""
_FEW = 5
"""Correlation lengths that the shortest axis of a field should have."""
_MEASURE_KEYS = ("limit_to", "periodic")


@dataclass(frozen=True)
class Target:
    """The target descriptors, one set for all directions or one for each, and their origin."""

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
    """The structure by which a result is judged, for each direction or for all; empty where the data are
    descriptors of a run that had not measured it."""

    compared: Sequence[str] = ()
    """The descriptors that a field is compared by; empty for all."""

    @property
    def levels(self) -> int:
        """The number of grids on which the descriptors that are compared were measured."""
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
        found = []
        for s2 in torch.stack([t[S2][:, 0] for t in self.descriptors]).mean(dim=0):
            share = float(s2[middle, middle])
            along = (s2[middle:, middle] + s2[middle, middle:]) / 2
            found.append((along - share**2) / max(share - share**2, 1e-12))
        return found

    @property
    def correlation_lengths_px(self) -> list[float]:
        """The correlation length of each phase whose indicator the field has: the distance along an axis, in
        pixels, at which the covariance falls to 1 / e of the variance; limit_to - 1 where it does not fall so
        far."""
        return [_falls_to(covariance.numpy(), 1 / np.e) for covariance in self.covariances]

    @property
    def correlation_length_px(self) -> float:
        """The correlation length of the phase that is correlated farthest; limit_to - 1 where its covariance
        does not fall to 1 / e."""
        return max(self.correlation_lengths_px)

    @property
    def warnings(self) -> list[str]:
        """Sentences about limits of the target that a reader of the results should know."""
        length, shortest = self.correlation_length_px, min(self.shape)
        if shortest >= _FEW * length:
            return []
        at_least = "at least " if length >= self.measure.limit_to - 1 else ""
        return [
            f"the shortest axis, {shortest} pixels, is less than {_FEW} correlation lengths of {at_least}{length:.1f} pixels: so "
            "small a field has few independent parts, and its statistics are a matter of chance. Take a larger shape"
        ]


def _falls_to(values: np.ndarray, level: float) -> float:
    """Return where values fall to a level for the first time, linear between two places; the last place where
    they never do."""
    below = np.flatnonzero(values < level)
    if not len(below):
        return float(len(values) - 1)
    after = int(below[0])
    return float(after - 1 + (values[after - 1] - level) / (values[after - 1] - values[after]))


def holds_descriptors(data: str) -> bool:
    """Return whether `data` names a file of descriptors, and no microstructures."""
    return data.endswith((".npz", *mcrpy_files.SUFFIXES))


def measure_of(config: MicrostructureConfig) -> Measure:
    return Measure(config.limit_to, config.periodic, config.gram_network)


def load_target(config: MicrostructureConfig, also: Sequence[str] = ()) -> Target:
    """Load the target that the settings name.

    Args:
        config: the settings.
        also: descriptors beside those of the settings, which need not be differentiable.

    Raises:
        DataError: lists every problem of the files, one per line.
    """
    names = list(dict.fromkeys([*config.descriptor_types, *also, S2]))
    if config.data.endswith(mcrpy_files.SUFFIXES):
        return _from_mcrpy(config, [*config.descriptor_types, *also])
    if holds_descriptors(config.data):
        return _from_descriptors(config, names)
    measure = measure_of(config)
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
    descriptors = _described(config, fields, names, measure)
    return Target(
        descriptors,
        measure,
        num_phases=len(fields[0]),
        shape=_shape(config, tuple(fields[0].shape[1:])),
        summary=f"{origin}; descriptors {', '.join(config.descriptor_types)}",
        phases=decided(fields[0]),
        structure=_structure(config, fields),
        compared=config.descriptor_types,
    )


def _structure(config: MicrostructureConfig, fields: Sequence[Tensor]) -> list[Structure]:
    """Measure the structure of the data by which results are judged, for each direction or as one mean."""
    parts = [
        part
        for field in fields
        for part in structures(decided(field), max(2, len(field)), config.limit_to, config.periodic)
    ]
    return [mean_structure(parts)] if config.isotropic else parts


def _described(
    config: MicrostructureConfig, fields: Sequence[Tensor], names: Sequence[str], measure: Measure
) -> list[dict[str, Tensor]]:
    """Measure the descriptors of the data: one set for each direction of a volume or for each picture, or one
    mean over the directions if the settings are isotropic."""
    sets = [
        characterize(field, names, measure, multigrid=config.multigrid_descriptor, isotropic=config.isotropic)
        for field in fields
    ]
    if fields[0].ndim == 4 and not config.isotropic:
        return [{name: values[direction] for name, values in sets[0].items()} for direction in range(3)]
    return _mean(sets) if config.isotropic else sets


def _shape(config: MicrostructureConfig, of_data: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the field to find: that of the settings, or the data's own, for a picture with a
    third axis of `add_dimension` slices.

    Args:
        config: the settings.
        of_data: the shape of the data.
    """
    if config.shape:
        return config.shape
    if config.data == "generated":
        of_data = tuple(max(length, 2 * config.limit_to) for length in _SHAPE_FOR_GENERATED)
        return of_data if config.add_dimension is None else (*of_data[:2], config.add_dimension)
    if config.add_dimension is None:
        return of_data
    if len(of_data) == 3:
        raise DataError(
            f"{config.data}: is a volume already, and add_dimension is for pictures. Leave it out"
        )
    return (*of_data, config.add_dimension)


def save_descriptors(path: Path, target: Target) -> None:
    """Write all descriptors as `direction_0/NAME` and so on and the structure as `structure_0/NAME`, beside
    limit_to, periodic, num_phases and the shape. The file is written whole or not at all."""
    arrays = {
        f"direction_{direction}/{name}": values.numpy()
        for direction, of_direction in enumerate(target.descriptors)
        for name, values in of_direction.items()
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
    problems = [
        f"{name} is {arrays[name].item()!r} there, and {getattr(config, name)!r} in the settings"
        for name in _MEASURE_KEYS
        if arrays[name].item() != getattr(config, name)
    ]
    num_phases = int(arrays["num_phases"])
    problems += _wrong_phases(config, num_phases)
    keys = [key.partition("/") for key in arrays if key.startswith("direction_")]
    num_directions = len({direction for direction, _, _ in keys})
    known = {name for _, _, name in keys}
    if lacking := [name for name in names if name not in known]:
        problems.append(
            f"it lacks {', '.join(lacking)}, and has {', '.join(sorted(known & set(DESCRIPTORS)))}"
        )
    if problems:
        raise DataError("\n".join(f"{config.data}: {problem}" for problem in problems))
    structure = [
        Structure(
            *(
                torch.from_numpy(arrays[f"structure_{direction}/{field.name}"])
                for field in fields_of(Structure)
            )
        )
        for direction in range(sum(key.endswith("/lineal_path") for key in arrays))
    ]
    return Target(
        _as_asked(
            config,
            [
                {name: torch.from_numpy(arrays[f"direction_{direction}/{name}"]) for name in names}
                for direction in range(num_directions)
            ],
        ),
        measure_of(config),
        num_phases if config.multiphase else 1,
        _shape(config, tuple(int(length) for length in arrays["shape"])),
        summary=f"descriptors {', '.join(config.descriptor_types)} from {config.data}",
        structure=[mean_structure(structure)] if config.isotropic and structure else structure,
        compared=config.descriptor_types,
    )


def _from_mcrpy(config: MicrostructureConfig, names: Sequence[str]) -> Target:
    """Read the target from a characterization of MCRpy. Raises DataError with a line for each problem of the
    file."""
    measure = measure_of(config)
    saved = mcrpy_files.read(config.data, names, measure)
    problems = _wrong_phases(config, saved.num_phases)
    if saved.shape is None and not config.shape:
        problems.append("does not say how large the field was. Give the shape that is looked for, as shape")
    if problems:
        raise DataError("\n".join(f"{config.data}: {problem}" for problem in problems))
    origin = f"descriptors {', '.join(config.descriptor_types)} of MCRpy from {config.data}"
    return Target(
        _as_asked(config, saved.descriptors),
        measure,
        saved.num_phases if config.multiphase else 1,
        _shape(config, saved.shape or ()),
        summary="; ".join([origin, *saved.notes]),
        compared=config.descriptor_types,
    )


def _wrong_phases(config: MicrostructureConfig, num_phases: int) -> list[str]:
    """Return a phrase if the phases of a file of descriptors do not fit the setting `multiphase`."""
    if num_phases == 1 and config.multiphase:
        return ["it has the second of two phases alone, and multiphase is True"]
    if num_phases > 2 and not config.multiphase:
        return [f"it has {num_phases} phases, and multiphase is False"]
    return []


def _as_asked(
    config: MicrostructureConfig, sets: Sequence[Mapping[str, Tensor]]
) -> Sequence[Mapping[str, Tensor]]:
    """Return the descriptors of a file as if they had been measured with the settings: the second of two
    phases alone, on one grid, or as a mean over the directions."""
    if not config.multiphase:
        sets = [{name: values[-1:] for name, values in one.items()} for one in sets]
    if not config.multigrid_descriptor:
        sets = [{name: values[:, :1] for name, values in one.items()} for one in sets]
    return _mean(sets) if config.isotropic else sets


def _mean(sets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the mean over the directions, on as many levels as each of them has."""
    mean = {}
    for name in sets[0]:
        levels = min(one[name].shape[1] for one in sets)
        mean[name] = torch.stack([one[name][:, :levels] for one in sets]).mean(dim=0)
    return [mean]


def _words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
