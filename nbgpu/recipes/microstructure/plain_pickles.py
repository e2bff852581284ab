"""Reads pickles that hold nothing but numbers, texts, containers and NumPy arrays, without running anything
that they name.

A pickle is a program: it names functions, and has them called. Here each name that a plain pickle needs
stands for a record of this module, which keeps what it is given, and every other name is refused. Arrays are
built afterwards out of the records, so that nothing of NumPy is called by the file either.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from nbgpu.errors import DataError

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


class Record:
    """An object of a class that is not loaded, by its attributes."""

    def __init__(self) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DType:
    """A dtype: what it was made with, and the order of its bytes."""

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
    """The file holds what a plain pickle does not."""


def _new_array(kind: type, shape: tuple[int, ...], code: bytes) -> _Array:
    return _Array()


def _built(content: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
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
    def __init__(self, file: Any, records: Collection[tuple[str, str]]) -> None:
        super().__init__(file)
        self._records = records

    def find_class(self, module_name: str, global_name: str) -> Any:
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
    """Raise a ValueError if an object is to be kept under a number for which the file is too short: Python
    makes as many places, and that may be more than there is memory."""
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
