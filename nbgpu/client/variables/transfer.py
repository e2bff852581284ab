"""The notebook's side of `%pull` and `%push`.

Functions and classes that were defined in the notebook are sent as source, which a rank runs as if it were in
a distributed cell. So a function finds its globals among the rank's own variables, `super()` and decorators
work, and tracebacks show its lines. A function that is pickled by value would instead keep copies of the
notebook's globals.
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
from nbgpu.protocol.records import Definition
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
        # This process owns the shared memory, so it is freed even if a rank dies.
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


def push(ranks: Ranks, chosen: Sequence[int], values: Mapping[str, Any]) -> list[str]:
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
    # Find the source of each function and class. A closure's source cannot run by itself, so its code is sent
    # with the values that it closes over.
    shell = ipython_shell.current()
    definitions: list[Definition] = []
    closures: dict[str, Any] = {}
    for name, value in code.items():
        if (definition := sources.find(name, value, shell)) is not None:
            definitions.append(definition)
        else:
            closures[name] = value
    # Check everything before anything is sent.
    problems = [
        f"{name}: its source is not known. Define it in a cell, at the left margin"
        for name, value in closures.items()
        if not isinstance(value, FunctionType)
    ]
    missing = _ask(ranks, chosen, Call.CHECK_DEFINITIONS, definitions)
    problems += [
        f"{user} cannot be defined without `{name}`, which {who}: {_remedy(name)}"
        for (user, name), who in _ranks_without_name(missing, len(ranks)).items()
        if name not in data
    ]
    if problems:
        raise TransferError("\n".join(problems))
    Packing(data)  # raises an error for values that cannot be sent
    # Send data that definitions need, such as the default of a parameter, then the definitions, and then the
    # other data, which may be instances of the classes.
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
            _ask(ranks, chosen, Call.FIND_LACKING_NAMES, definitions, list(closures)), len(ranks)
        ).items()
    ]


def _push_data(ranks: Ranks, chosen: Sequence[int], values: Mapping[str, Any]) -> None:
    """Give the chosen ranks variables of these names, with copies of the values.

    Ranks on this host read the values from shared memory, of which each copies a page when it first changes
    it. Ranks on other hosts get them as bytes in the message, and so do all ranks if the values are small.

    Raises:
        TransferError: some values cannot be sent; nothing was sent.
        RankError: a rank cannot rebuild a value.
    """
    packing = Packing(values)
    remaining = chosen
    if not packing.is_small:
        with shared_memory.created() as descriptor:
            packing.write(descriptor)
            address = shared_memory.address(descriptor)
            could_read = answers(
                ranks, lambda: ranks.call(Call.RECEIVE_VALUES, packing.parcel, address, ranks=chosen)
            )
            remaining = [rank for rank, has_values in could_read.items() if not has_values]
    if remaining:
        data = memoryview(packing.to_bytes())
        answers(ranks, lambda: ranks.call(Call.RECEIVE_VALUES, packing.parcel, data, ranks=remaining))


def _ask(ranks: Ranks, chosen: Sequence[int], what: Call, *arguments: Any) -> dict[int, Any]:
    return ranks.wait_for(ranks.call(what, *arguments, ranks=chosen))


def _ranks_without_name(
    by_rank: Mapping[int, Collection[tuple[str, str]]], num_ranks: int
) -> dict[tuple[str, str], str]:
    """Return the rest of a clause after 'which', such as 'rank 1 does not have', for each (definition,
    missing name).

    Args:
        by_rank: the pairs (definition, name that it uses and that is missing) of each rank that was asked.
        num_ranks: the number of all ranks.
    """
    ranks_by_pair = ranks_by((pair, rank) for rank, pairs in by_rank.items() for pair in pairs)
    return {
        pair: "the ranks do not have"
        if len(without) == num_ranks
        else f"{named_ranges(without)} {'does' if len(without) == 1 else 'do'} not have"
        for pair, without in ranks_by_pair.items()
    }


def _remedy(name: str) -> str:
    """Return what gives the ranks a name: a magic, or its definition if the notebook does not have it."""
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

    An interrupt during the sending is held back until all ranks have the call, so that all of them can be
    interrupted.
    """
    sent = send()
    try:
        return ranks.wait_for(sent)
    except KeyboardInterrupt:
        ranks.interrupt(rank for rank, result in sent.items() if not result.ready())
        raise CellInterrupted(list(ranks.gone()), len(ranks)) from None
