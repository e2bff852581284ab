"""Values for the way between the notebook and a rank: a pickle, and beside it the bytes of arrays and
tensors.

The bytes are copied once, into memory that both sides share, and the receiver uses them there; the pickle
says how to build the values on them. Values that cannot travel are named, with their paths, before anything
is sent.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from types import FunctionType
from typing import TYPE_CHECKING, Any

import psutil

from nbgpu.errors import TransferError
from nbgpu.serialization import shared_memory, unpicklable

if TYPE_CHECKING:
    from nbgpu.serialization.tensors import Source, TensorForm

LARGE_BYTES = 128 * 1024
"""Blocks of this size and above get a mapping of their own, so that each is freed by itself, as malloc does
it."""
_MAX_MAPPINGS = 4096
"""The most mappings for one parcel; all further blocks are copied. A process may have 65530 mappings."""
_ALIGNMENT_BYTES = 64
"""Copied blocks begin at multiples of this, the size of a cache line, which suits every dtype."""


@dataclass(frozen=True)
class Span:
    """The position of a block among a parcel's bytes."""

    offset: int
    size: int
    is_mapped: bool = False


@dataclass(frozen=True)
class Parcel:
    """The description of a parcel that the receiver needs in addition to the bytes."""

    names: tuple[str, ...]
    pickle: Span
    blocks: tuple[Span, ...]
    buffers: tuple[int, ...]
    """The numbers of the blocks that are the pickle's out-of-band buffers, in order, beside those that it
    names."""
    tensors: tuple[TensorForm, ...]
    defined_in_cells: Mapping[str, str]
    """Classes and functions that the sender has defined in a cell, by name, with the path to a value that
    needs each."""
    size_bytes: int


class Packing:
    """Values that are ready to be sent.

    Args:
        values: the values by name. They must not change before they have been written.

    Raises:
        TransferError: some values cannot travel, with a line for each, or there is not enough memory for
            them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Pickle the values, and assign each block of bytes its position behind the pickle. The bytes
        themselves are copied by `write` or `to_bytes`."""
        stream, contents = io.BytesIO(), _Contents()
        try:
            _Pickler(stream, contents).dump(dict(values))
        except Exception as error:  # noqa: BLE001 - pickling an object may raise anything
            # The parts that cannot travel are searched for only now, because the search pickles every part
            # again.
            found = unpicklable.described(values, refusal)
            raise TransferError("\n".join(found or [f"{', '.join(values)}: {error}"])) from None
        blocks = contents.blocks
        forms: list[TensorForm] = []
        if contents.tensors:
            from nbgpu.serialization import tensors

            forms, tensor_blocks = tensors.take_apart(contents.tensors, first_block=len(blocks))
            blocks = blocks + tensor_blocks
        self._sources: list[Source] = [stream.getbuffer(), *(source for _, source in blocks)]
        pickle_span, *block_spans = _laid_out([stream.tell(), *(size_bytes for size_bytes, _ in blocks)])
        self.parcel = Parcel(
            names=tuple(values),
            pickle=pickle_span,
            blocks=tuple(block_spans),
            buffers=tuple(contents.buffers),
            tensors=tuple(forms),
            # If the receiver lacks one of them, its error names the value that needs it.
            defined_in_cells={n: unpicklable.path_to(n, values) for n in contents.defined_in_cells},
            size_bytes=max(span.offset + span.size for span in (pickle_span, *block_spans)),
        )
        free_bytes = psutil.virtual_memory().available
        if self.parcel.size_bytes > free_bytes:
            raise TransferError(
                f"{', '.join(values)}: {self.parcel.size_bytes:,} bytes would travel, and {free_bytes:,} bytes of "
                "memory are free"
            )

    @property
    def is_small(self) -> bool:
        """Whether the bytes are few enough to go into the message itself."""
        return self.parcel.size_bytes <= LARGE_BYTES

    def write(self, descriptor: int) -> None:
        """Write all bytes into shared memory."""
        os.ftruncate(descriptor, self.parcel.size_bytes)
        for span, source in self._parts():
            if isinstance(source, memoryview):
                shared_memory.write(descriptor, source, span.offset)
            else:
                start = span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
                size_bytes = span.offset + span.size - start
                source(memoryview(mmap.mmap(descriptor, size_bytes, offset=start))[span.offset - start :])

    def to_bytes(self) -> bytearray:
        """All bytes, to be sent in a message."""
        everything = bytearray(self.parcel.size_bytes)
        for span, source in self._parts():
            part = memoryview(everything)[span.offset : span.offset + span.size]
            if isinstance(source, memoryview):
                part[:] = source
            else:
                source(part)
        return everything

    def _parts(self) -> list[tuple[Span, Source]]:
        return list(zip([self.parcel.pickle, *self.parcel.blocks], self._sources, strict=True))


def refusal(value: Any) -> Exception | None:
    """The reason why a value cannot travel; None where it can."""
    try:
        _Pickler(_Nowhere(), _Contents()).dump(value)
    except Exception as error:  # noqa: BLE001 - pickling an object may raise anything
        return error
    return None


def unpack(
    parcel: Parcel, read: Callable[[Span], Any], variables: Mapping[str, Any], where_to_define: str
) -> dict[str, Any]:
    """The values of a parcel, by name, in memory of their own.

    Args:
        parcel: the received parcel.
        read: returns a writable buffer with the bytes of a span.
        variables: the variables among which to look up classes and functions that the sender has defined in a
            cell.
        where_to_define: the part of an error message that says how to define such a class here.

    Raises:
        TransferError: a class is missing, or a value cannot be rebuilt.
    """
    missing = [
        (path, name) for name, path in parcel.defined_in_cells.items() if _found(name, variables) is None
    ]
    if missing:
        raise TransferError(
            "\n".join(
                f"{path}: {name} is defined in a cell there and not here. {where_to_define}"
                for path, name in missing
            )
        )
    try:
        values: dict[str, Any] = _Unpickler(parcel, read, variables).load()
    except Exception as error:
        raise TransferError(
            f"{', '.join(parcel.names)}: cannot be put together here: {type(error).__name__}: {error}"
        ) from error
    return values


def from_descriptor(descriptor: int) -> Callable[[Span], Any]:
    """A function that reads spans from shared memory. The descriptor may be closed after the reads."""

    def read(span: Span) -> Any:
        if span.is_mapped:
            return shared_memory.mapped(descriptor, span.offset, span.size)
        return shared_memory.read(descriptor, span.offset, span.size)

    return read


def from_bytes(everything: bytes | bytearray | memoryview) -> Callable[[Span], Any]:
    """A function that reads spans from the bytes in a message."""
    return lambda span: bytearray(memoryview(everything)[span.offset : span.offset + span.size])


class _Contents:
    """The data that are sent beside the pickle. A class apart from the pickler, so that no cycle of
    references holds the values."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, Source]] = []
        """The size in bytes and the source of each block."""
        self.buffers: list[int] = []
        """The numbers of the blocks that are the pickle's out-of-band buffers."""
        self.tensors: list[Any] = []
        self.defined_in_cells: list[str] = []
        """The names of classes and functions."""

    def lay_buffer_aside(self, buffer: pickle.PickleBuffer) -> bool:
        """Lay a large buffer aside. Returns whether the pickle is to contain the bytes itself."""
        raw = buffer.raw()
        if len(raw) < LARGE_BYTES:
            return True
        self.buffers.append(self.lay_aside(len(raw), raw))
        return False

    def lay_aside(self, size_bytes: int, source: Source) -> int:
        """Add a block and return its number."""
        self.blocks.append((size_bytes, source))
        return len(self.blocks) - 1


class _Pickler(pickle.Pickler):
    """Pickles values, and lays the bytes of arrays and tensors aside."""

    def __init__(self, file: Any, contents: _Contents) -> None:
        super().__init__(file, protocol=5, buffer_callback=contents.lay_buffer_aside)
        self._contents = contents
        # A library that is not loaded cannot be the source of any value.
        self._numpy = sys.modules.get("numpy")
        self._torch = sys.modules.get("torch")
        if self._torch is not None:
            from nbgpu.serialization import tensors

            self._is_plain = tensors.is_plain

    def reducer_override(self, value: Any) -> Any:
        """Lay arrays and tensors aside, and refer to functions and classes of cells by name. For every other
        value NotImplemented has pickle go on as usual."""
        if self._numpy is not None and type(value) is self._numpy.ndarray:
            return NotImplemented if value.dtype.hasobject or not value.itemsize else self._array(value)
        if self._torch is not None and isinstance(value, self._torch.Tensor) and self._is_plain(value):
            self._contents.tensors.append(value)
            return _tensor, (len(self._contents.tensors) - 1, vars(value) or None)
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            if "<" in value.__qualname__:
                return NotImplemented  # pickle raises an error that says it has no name
            self._contents.defined_in_cells.append(value.__qualname__)
            return _own, (value.__qualname__,)
        if unpicklable.must_stay(value):
            raise pickle.PicklingError
        return NotImplemented

    def _array(self, array: Any) -> Any:
        """Lay the bytes of an array aside, and return the call that builds the array on them. An array that
        is contiguous in C or Fortran order is sent as it lies in memory; any other is copied in C order."""
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        source: Source
        if array.flags.forc:
            source = memoryview(array.reshape(-1, order=order).view("uint8"))
        else:
            new_array = type(array)

            def source(buffer: memoryview) -> None:
                new_array(array.shape, array.dtype, buffer)[...] = array

        return _array, (self._contents.lay_aside(array.nbytes, source), array.shape, array.dtype, order)


class _Builder:
    """Builds the values that the pickle refers to by the names of these methods. A class apart from the
    unpickler, so that no cycle of references holds the values."""

    def __init__(self, parcel: Parcel, read: Callable[[Span], Any], variables: Mapping[str, Any]) -> None:
        # Each block is read once, because several tensors may view the same.
        self.block = cache(lambda number: read(parcel.blocks[number]))
        self._forms = parcel.tensors
        self._variables = variables

    def _array(self, number: int, shape: tuple[int, ...], dtype: Any, order: Any) -> Any:
        import numpy as np

        return np.ndarray(shape, dtype, self.block(number), order=order)

    def _tensor(self, number: int, attributes: Mapping[str, Any] | None) -> Any:
        """Build a tensor in the memory of its block, with the attributes that a person has set on it."""
        from nbgpu.serialization import tensors

        form = self._forms[number]
        tensor = tensors.put_together(form, self.block(form.block) if form.block >= 0 else None)
        if attributes:
            vars(tensor).update(attributes)
        return tensor

    def _own(self, name: str) -> Any:
        return _found(name, self._variables)


class _Unpickler(pickle.Unpickler):
    """Unpickles a parcel with its blocks as out-of-band buffers."""

    def __init__(self, parcel: Parcel, read: Callable[[Span], Any], variables: Mapping[str, Any]) -> None:
        self._builder = builder = _Builder(parcel, read, variables)
        super().__init__(
            io.BytesIO(read(parcel.pickle)), buffers=(builder.block(number) for number in parcel.buffers)
        )

    def find_class(self, module: str, name: str) -> Any:
        """Return the builder's method in place of a function that only gives the pickle a name; all other
        classes and functions are found as usual."""
        if module == __name__ and name in _BUILT_BY_THE_UNPICKLER:
            return getattr(self._builder, name)
        return super().find_class(module, name)


def _stands_for(name: str) -> Callable[..., Any]:
    """A function that only gives the pickle a name, for which the unpickler substitutes the builder's
    method."""

    def built_by_the_unpickler(*_: Any) -> Any:
        raise pickle.UnpicklingError("a parcel is opened with unpack")

    built_by_the_unpickler.__qualname__ = built_by_the_unpickler.__name__ = name
    return built_by_the_unpickler


_array, _tensor, _own = map(_stands_for, _BUILT_BY_THE_UNPICKLER := ("_array", "_tensor", "_own"))


class _Nowhere:
    """A file that drops what is written, to find out whether a value can be pickled."""

    def write(self, data: Any) -> int:
        return len(data)


def _found(name: str, variables: Mapping[str, Any]) -> Any:
    first, *rest = name.split(".")
    return reduce(lambda found, inner: getattr(found, inner, None), rest, variables.get(first))


def _laid_out(sizes: Sequence[int]) -> list[Span]:
    """The position of each block: first the small ones, which are copied, then those that are mapped, each on
    a page."""
    mapped = [number for number, size in enumerate(sizes) if number and size >= LARGE_BYTES][:_MAX_MAPPINGS]
    spans: dict[int, Span] = {}
    end = 0
    for number in [n for n in range(len(sizes)) if n not in set(mapped)]:
        spans[number] = Span(end, sizes[number])
        end = _rounded_up(end + sizes[number], _ALIGNMENT_BYTES)
    for number in mapped:
        end = _rounded_up(end, mmap.ALLOCATIONGRANULARITY)
        spans[number] = Span(end, sizes[number], is_mapped=True)
        end += sizes[number]
    return [spans[number] for number in range(len(sizes))]


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
