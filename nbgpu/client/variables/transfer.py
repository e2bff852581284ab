"""The notebook's side of `%pull` and `%push`.

Functions and classes that were defined in the notebook are sent as source, which a rank runs as if it were in
a distributed cell. So a function finds its globals among the rank's own variables, `super()` and decorators
work, and tracebacks show its lines. Pickling by value would bring copies of the notebook's globals along,
which would then be neither the notebook's nor the rank's.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import FunctionType, ModuleType
from typing import Any

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.errors import CellInterrupted, TransferError
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.serialization import shared_memory, sources
from nbgpu.serialization.parcels import Packing, from_bytes, from_descriptor, unpack
from nbgpu.text.ranks import named_ranges, ranks_by

_WHERE_TO_DEFINE = (
    "Run the cell that defines it as a plain cell too, so that the notebook has it, or pull what it is made of, such as "
    "its vars()"
)


def pull(ranks: Ranks, chosen: Iterable[int], names: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Copy variables of the chosen ranks, by rank and name, into this process's own memory.

    Raises:
        RankError: a rank has no variable of a name, or its value cannot travel.
        CellInterrupted: the user pressed Stop; the ranks were interrupted, too.
        TransferError: a value cannot be rebuilt here.
    """
    with ExitStack() as open_:
        # The memory belongs to this process, so that a rank keeps none of it, whatever happens to either of
        # them.
        descriptors = {rank: open_.enter_context(shared_memory.created()) for rank in chosen}

        def send() -> dict[int, Reply]:
            sent: dict[int, Reply] = {}
            for rank, descriptor in descriptors.items():
                address = shared_memory.address(descriptor)
                sent |= ranks.call(Call.SEND_VALUES, names, address, ranks=[rank])
            return sent

        parcels = answers(ranks, send)
        return {
            rank: unpack(
                parcel,
                from_descriptor(descriptors[rank]) if carried is None else from_bytes(carried),
                vars(sys.modules["__main__"]),
                _WHERE_TO_DEFINE,
            )
            | dict(zip(names_of_code, code, strict=True))
            for rank, (parcel, carried, names_of_code, *code) in parcels.items()
        }


def push(
    ranks: Ranks,
    chosen: Sequence[int],
    values: Mapping[str, Any],
) -> list[str]:
    """Send functions, classes and data of the notebook to ranks, in an order in which the definitions work.

    Args:
        ranks: all ranks.
        chosen: the ranks that get the values.
        values: the values by name.

    Returns:
        A line for each name that the functions use when they are called, and that ranks do not have.

    Raises:
        TransferError: ranks lack a name that a definition needs, or the source is not known; no definition
            was sent.
        RankError: a definition raised.
    """
    code = {name: value for name, value in values.items() if is_local(value)}
    data = {name: value for name, value in values.items() if name not in code}
    if not code:
        _push_data(ranks, chosen, data)
        return []
    shell = ipython_shell.current()
    found = {name: sources.find(name, value, shell) for name, value in code.items()}
    known = {name: definition for name, definition in found.items() if definition is not None}
    # A closure has no source that could be run by itself. Its code is sent with the values that it closes
    # over.
    closures = {name: value for name, value in code.items() if name not in known}
    problems = [
        f"{name}: its source is not known. Define it in a cell, at the left margin"
        for name, value in closures.items()
        if not isinstance(value, FunctionType)
    ]
    definitions = list(known.values())
    missing = _ask(ranks, chosen, Call.CHECK_DEFINITIONS, definitions)
    problems += [
        f"{user} cannot be defined without `{name}`, which {who}: {_remedy(name)}"
        for (user, name), who in _ranks_without_name(missing).items()
        if name not in data
    ]
    if problems:
        raise TransferError("\n".join(problems))
    Packing(data)  # raises an error for values that cannot travel, before anything is sent
    # The default of a parameter may need data, and data may be instances of a class.
    first = {name for pairs in missing.values() for _, name in pairs}
    if first:
        _push_data(ranks, chosen, {name: value for name, value in data.items() if name in first})
    for name, value in closures.items():
        filename = value.__code__.co_filename
        _ask(ranks, chosen, Call.REMEMBER_SOURCE, filename, "".join(linecache.getlines(filename)))
        ranks.wait_for({rank: ranks[rank].push({name: value}, block=False) for rank in chosen})
    if definitions:
        _ask(ranks, chosen, Call.DEFINE, definitions)
    if rest := {name: value for name, value in data.items() if name not in first}:
        _push_data(ranks, chosen, rest)
    return [
        f"{user} uses `{name}`, which {who}: {_remedy(name)}"
        for (user, name), who in _ranks_without_name(
            _ask(ranks, chosen, Call.FIND_LACKING_NAMES, definitions, list(closures))
        ).items()
    ]


def _push_data(ranks: Ranks, chosen: Sequence[int], values: Mapping[str, Any]) -> None:
    """Give the chosen ranks variables of these names, with copies of the values.

    The values are written once, and each rank copies a page of the memory when it first changes it.

    Raises:
        TransferError: some values cannot travel; nothing was sent.
        RankError: a rank cannot rebuild a value.
    """
    packing = Packing(values)
    left = chosen
    if not packing.is_small:
        with shared_memory.created() as descriptor:
            packing.write(descriptor)
            address = shared_memory.address(descriptor)
            came = answers(
                ranks, lambda: ranks.call(Call.RECEIVE_VALUES, packing.parcel, address, ranks=chosen)
            )
            left = [rank for rank, has_come in came.items() if not has_come]
    if left:
        carried = memoryview(packing.to_bytes())
        answers(ranks, lambda: ranks.call(Call.RECEIVE_VALUES, packing.parcel, carried, ranks=left))


def _ask(ranks: Ranks, chosen: Sequence[int], what: Call, *arguments: Any) -> dict[int, Any]:
    return ranks.wait_for(ranks.call(what, *arguments, ranks=chosen))


def _ranks_without_name(by_rank: Mapping[int, Collection[tuple[str, str]]]) -> dict[tuple[str, str], str]:
    """The ranks that do not have a name, in words, by (the definition that uses it, name)."""
    lacking = ranks_by((pair, rank) for rank, pairs in by_rank.items() for pair in pairs)
    return {
        pair: "the ranks do not have"
        if len(without) == len(by_rank)
        else f"{named_ranges(without)} {'does' if len(without) == 1 else 'do'} not have"
        for pair, without in lacking.items()
    }


def _remedy(name: str) -> str:
    """Return the magic that brings a name of the notebook to the ranks, by whether the name was imported."""
    variables = vars(sys.modules["__main__"])
    if name not in variables:
        return f"define {name} first"
    value = variables[name]
    imported = isinstance(value, ModuleType) or (
        isinstance(value, FunctionType | type) and not is_local(value)
    )
    return "%nbgpu sync" if imported else f"%push {name}"


def is_local(value: Any) -> bool:
    """Whether a value is a function or a class that was defined in the notebook and not imported."""
    is_code = isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__")
    return is_code and getattr(value, "__module__", None) == "__main__"


@uninterrupted()
def answers(ranks: Ranks, send: Callable[[], Mapping[int, Reply]]) -> dict[int, Any]:
    """Send a call to ranks with `send`, and return their answers by rank.

    A Stop during the sending is raised once all ranks have the call: otherwise the ranks that have it would
    go on with nobody to interrupt them.
    """
    sent = send()
    try:
        return ranks.wait_for(sent)
    except KeyboardInterrupt:
        ranks.interrupt(rank for rank, result in sent.items() if not result.ready())
        raise CellInterrupted(list(ranks.gone()), len(ranks)) from None
