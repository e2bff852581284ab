"""Serialization of values for the transfer between the notebook and a rank: a pickle, and separately the
bytes of arrays and tensors.

The bytes are copied once, into memory that both sides share, and the receiver builds its arrays and tensors
in that memory. Values that cannot be transferred are reported with their paths before anything is sent.
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
"""Blocks of at least this size get a memory mapping each, so that they are freed independently. malloc has
the same threshold."""
_MAX_MAPPINGS = 4096
"""The largest number of mappings for one parcel; further blocks are copied. A process may have 65530
mappings."""
_ALIGNMENT_BYTES = 64
"""Copied blocks are aligned to the size of a cache line, which is enough for every dtype."""


@dataclass(frozen=True)
class Span:
    """The position of a block in a parcel's bytes."""

    offset: int
    size: int
    """In bytes."""
    is_mapped: bool = False
    """Whether the receiver maps the block into its memory instead of copying it."""


@dataclass(frozen=True)
class Parcel:
    """The description of a parcel that the receiver needs in addition to the bytes."""

    names: tuple[str, ...]
    """The names of the values."""
    pickle: Span
    blocks: tuple[Span, ...]
    """The bytes of arrays and tensors."""
    buffers: tuple[int, ...]
    """The indices of the blocks that are the pickle's out-of-band buffers, in order. The pickle refers to the
    other blocks itself."""
    tensors: tuple[TensorForm, ...]
    defined_in_cells: Mapping[str, str]
    """By the name of each class or function that the sender has defined in a cell, the path to a value that
    needs it."""
    size_bytes: int


class Packing:
    """Values that are ready to be sent.

    Args:
        values: the values by name. They must not change before they have been written.

    Raises:
        TransferError: some values cannot be transferred, with a line for each, or there is not enough memory
            for them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Pickle the values, and assign each block a position behind the pickle. `write` or `to_bytes` copies
        the blocks."""
        stream, contents = io.BytesIO(), _Contents()
        try:
            _Pickler(stream, contents).dump(dict(values))
        except Exception as error:  # noqa: BLE001 - pickling an object may raise anything
            # The search for the parts that cannot be pickled is slow, because it pickles every part again.
            problems = unpicklable.described(values, refusal)
            raise TransferError("\n".join(problems or [f"{', '.join(values)}: {error}"])) from None
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
            # The path is for the receiver's error if it does not have the class or function.
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
        """Whether the bytes are few enough to be sent in the message itself."""
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
        """Return all bytes, to be sent in a message."""
        content = bytearray(self.parcel.size_bytes)
        for span, source in self._parts():
            part = memoryview(content)[span.offset : span.offset + span.size]
            if isinstance(source, memoryview):
                part[:] = source
            else:
                source(part)
        return content

    def _parts(self) -> list[tuple[Span, Source]]:
        """Return the position and the source of the pickle and of each block."""
        return list(zip([self.parcel.pickle, *self.parcel.blocks], self._sources, strict=True))


def refusal(value: Any) -> Exception | None:
    """Return the error with which a value cannot be pickled; None if it can be."""
    try:
        _Pickler(_Nowhere(), _Contents()).dump(value)
    except Exception as error:  # noqa: BLE001 - pickling an object may raise anything
        return error
    return None


def unpack(
    parcel: Parcel, read: Callable[[Span], Any], variables: Mapping[str, Any], where_to_define: str
) -> dict[str, Any]:
    """Return the values of a parcel, by name. They do not share memory with the sender.

    Args:
        parcel: the received parcel.
        read: returns a writable buffer with the bytes of a span.
        variables: the receiver's variables, which must have the classes and functions that the sender has
            defined in cells.
        where_to_define: the sentence of an error message on how to define such a class on the receiver.

    Raises:
        TransferError: a class or function is missing, or a value cannot be rebuilt.
    """
    missing = [
        f"{path}: {name} is defined in a cell there and not here. {where_to_define}"
        for name, path in parcel.defined_in_cells.items()
        if _look_up(name, variables) is None
    ]
    if missing:
        raise TransferError("\n".join(missing))
    try:
        values: dict[str, Any] = _Unpickler(parcel, read, variables).load()
    except Exception as error:
        raise TransferError(
            f"{', '.join(parcel.names)}: cannot be put together here: {type(error).__name__}: {error}"
        ) from error
    return values


def from_descriptor(descriptor: int) -> Callable[[Span], Any]:
    """Return a function that reads spans from shared memory, whose descriptor may be closed afterwards."""

    def read(span: Span) -> Any:
        if span.is_mapped:
            return shared_memory.mapped(descriptor, span.offset, span.size)
        return shared_memory.read(descriptor, span.offset, span.size)

    return read


def from_bytes(content: bytes | bytearray | memoryview) -> Callable[[Span], Any]:
    """Return a function that reads spans from the bytes in a message."""
    return lambda span: bytearray(memoryview(content)[span.offset : span.offset + span.size])


class _Contents:
    """The data that are sent beside the pickle. This is a class apart from the pickler to avoid a reference
    cycle, which would keep the values alive."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, Source]] = []
        """The size in bytes and the source of each block."""
        self.buffers: list[int] = []
        """The indices of the blocks that are the pickle's out-of-band buffers."""
        self.tensors: list[Any] = []
        self.defined_in_cells: list[str] = []
        """The names of classes and functions."""

    def add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Add a large out-of-band buffer as a block; return whether the pickle must contain the bytes
        instead (pickle's `buffer_callback`)."""
        raw = buffer.raw()
        if len(raw) < LARGE_BYTES:
            return True
        self.buffers.append(self.add_block(len(raw), raw))
        return False

    def add_block(self, size_bytes: int, source: Source) -> int:
        """Add a block and return its index."""
        self.blocks.append((size_bytes, source))
        return len(self.blocks) - 1


class _Pickler(pickle.Pickler):
    """Pickles values, but adds the bytes of arrays and tensors to the contents beside the pickle."""

    def __init__(self, file: Any, contents: _Contents) -> None:
        super().__init__(file, protocol=5, buffer_callback=contents.add_buffer)
        self._contents = contents
        # If a library is not imported, no value can be of its types.
        self._numpy = sys.modules.get("numpy")
        self._torch = sys.modules.get("torch")
        if self._torch is not None:
            from nbgpu.serialization import tensors

            self._is_plain = tensors.is_plain

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild an array, a tensor, or a function or class of a cell, which is sent by name.
        For other values NotImplemented tells pickle to proceed as usual."""
        if self._numpy is not None and type(value) is self._numpy.ndarray:
            return NotImplemented if value.dtype.hasobject or not value.itemsize else self._array(value)
        if self._torch is not None and isinstance(value, self._torch.Tensor) and self._is_plain(value):
            self._contents.tensors.append(value)
            return _tensor, (len(self._contents.tensors) - 1, vars(value) or None)
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            if "<" in value.__qualname__:
                return NotImplemented  # a lambda or local class, for which pickle raises an error
            self._contents.defined_in_cells.append(value.__qualname__)
            return _defined, (value.__qualname__,)
        if unpicklable.must_stay(value):
            raise pickle.PicklingError
        return NotImplemented

    def _array(self, array: Any) -> Any:
        """Add the bytes of an array as a block, and return the call that rebuilds the array. The memory of an
        array that is contiguous in C or Fortran order is sent unchanged; other arrays are copied in C
        order."""
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        source: Source
        if array.flags.forc:
            source = memoryview(array.reshape(-1, order=order).view("uint8"))
        else:
            new_array = type(array)

            def source(buffer: memoryview) -> None:
                new_array(array.shape, array.dtype, buffer)[...] = array

        return _array, (self._contents.add_block(array.nbytes, source), array.shape, array.dtype, order)


class _Builder:
    """Builds the values for which the pickle calls these methods by name. This is a class apart from the
    unpickler to avoid a reference cycle, which would keep the values alive."""

    def __init__(self, parcel: Parcel, read: Callable[[Span], Any], variables: Mapping[str, Any]) -> None:
        # Each block is read once, because several tensors may share it.
        self.block = cache(lambda number: read(parcel.blocks[number]))
        self._forms = parcel.tensors
        self._variables = variables

    def _array(self, number: int, shape: tuple[int, ...], dtype: Any, order: Any) -> Any:
        import numpy as np

        return np.ndarray(shape, dtype, self.block(number), order=order)

    def _tensor(self, number: int, attributes: Mapping[str, Any] | None) -> Any:
        """Build a tensor in the memory of its block, with the attributes that were set on it."""
        from nbgpu.serialization import tensors

        form = self._forms[number]
        tensor = tensors.put_together(form, self.block(form.block) if form.block >= 0 else None)
        if attributes:
            vars(tensor).update(attributes)
        return tensor

    def _defined(self, name: str) -> Any:
        """Return a function or class that was defined in a cell."""
        return _look_up(name, self._variables)


class _Unpickler(pickle.Unpickler):
    """Unpickles a parcel with its blocks as out-of-band buffers."""

    def __init__(self, parcel: Parcel, read: Callable[[Span], Any], variables: Mapping[str, Any]) -> None:
        self._builder = builder = _Builder(parcel, read, variables)
        super().__init__(
            io.BytesIO(read(parcel.pickle)), buffers=(builder.block(number) for number in parcel.buffers)
        )

    def find_class(self, module: str, name: str) -> Any:
        """Return the builder's method for a placeholder; all other classes and functions as usual."""
        if module == __name__ and name in _PLACEHOLDERS:
            return getattr(self._builder, name)
        return super().find_class(module, name)


def _placeholder(name: str) -> Callable[..., Any]:
    """Return a function that the pickle can refer to by name, and that the unpickler replaces by the
    builder's method of this name."""

    def placeholder(*_: Any) -> Any:
        raise pickle.UnpicklingError("a parcel is opened with unpack")

    placeholder.__qualname__ = placeholder.__name__ = name
    return placeholder


_array, _tensor, _defined = map(_placeholder, _PLACEHOLDERS := ("_array", "_tensor", "_defined"))


class _Nowhere:
    """A file that discards what is written, to test whether a value can be pickled."""

    def write(self, data: Any) -> int:
        return len(data)


def _look_up(name: str, variables: Mapping[str, Any]) -> Any:
    """Return the value of a qualified name such as 'Outer.Inner'; None if there is none."""
    first, *rest = name.split(".")
    return reduce(lambda value, attribute: getattr(value, attribute, None), rest, variables.get(first))


def _laid_out(sizes: Sequence[int]) -> list[Span]:
    """Return the position of each block: first the blocks that are copied, then those that are mapped, each
    at the beginning of a page. Block 0, the pickle, is always copied."""
    mapped = [index for index, size in enumerate(sizes) if index and size >= LARGE_BYTES][:_MAX_MAPPINGS]
    spans: dict[int, Span] = {}
    end = 0
    for index in sorted(set(range(len(sizes))) - set(mapped)):
        spans[index] = Span(end, sizes[index])
        end = _rounded_up(end + sizes[index], _ALIGNMENT_BYTES)
    for index in mapped:
        end = _rounded_up(end, mmap.ALLOCATIONGRANULARITY)
        spans[index] = Span(end, sizes[index], is_mapped=True)
        end += sizes[index]
    return [spans[index] for index in range(len(sizes))]


def _rounded_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below a number."""
    return -(-number // step) * step
