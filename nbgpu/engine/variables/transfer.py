"""The rank's side of `%pull` and `%push`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbgpu.engine.ipykernel import shell
from nbgpu.errors import TransferError
from nbgpu.serialization import shared_memory, unpicklable
from nbgpu.serialization.parcels import Packing, Parcel, from_bytes, from_descriptor, unpack
from nbgpu.serialization.shared_memory import Address

_WHERE_TO_DEFINE = "Send it first, with %push and its name"


def send(names: Sequence[str], into: Address) -> tuple[Any, ...]:
    """Return variables of this rank, or values of expressions, to the notebook (`%pull`).

    Args:
        names: the variables and expressions.
        into: the shared memory that the notebook has opened for their bytes.

    Returns:
        The parcel; its bytes, or None if they were written into that memory; the names of functions and
        classes that were defined in a cell; and these functions and classes one after the other, so that
        ipyparallel sends each as code.

    Raises:
        TransferError: a variable does not exist, an expression fails, or a value cannot be sent. The message
            has a line for each.
    """
    variables = shell.current().user_ns
    wrong = unpicklable.unknown(filter(str.isidentifier, names), variables)
    named = {}
    for name in names:
        if name in variables:
            named[name] = variables[name]
        elif not name.isidentifier():
            try:
                named[name] = eval(name, variables)
            except Exception as error:  # noqa: BLE001 - whatever it raises
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    code, values = unpicklable.code_apart(named)
    try:
        packing = Packing(values)
    except TransferError as error:
        wrong += str(error).splitlines()
    if wrong:
        raise TransferError("\n".join(wrong))
    if not packing.is_small:
        with shared_memory.opened(into) as descriptor:
            if descriptor is not None:
                packing.write(descriptor)
                return packing.parcel, None, list(code), *code.values()
    return packing.parcel, memoryview(packing.to_bytes()), list(code), *code.values()


def receive(parcel: Parcel, source: Address | memoryview) -> bool:
    """Store the notebook's values as variables of this rank, all or none (`%push`).

    Args:
        parcel: the description of the values.
        source: the shared memory that holds their bytes, or the bytes themselves.

    Returns:
        False if this rank cannot open that memory; the notebook then sends the bytes.

    Raises:
        TransferError: a value cannot be restored here.
    """
    variables = shell.current().user_ns
    if not isinstance(source, Address):
        variables.update(unpack(parcel, from_bytes(source), variables, _WHERE_TO_DEFINE))
        return True
    with shared_memory.opened(source) as descriptor:
        if descriptor is None:
            return False
        variables.update(unpack(parcel, from_descriptor(descriptor), variables, _WHERE_TO_DEFINE))
    return True
