"""Send functions and classes that were defined in the notebook to the ranks, as source.

A rank runs the source as if it were in a distributed cell. So a function finds its globals among the rank's
own variables, `super()` and decorators work, and tracebacks show its lines. Pickling by value would bring
copies of the notebook's globals along, which would then be neither the notebook's nor the rank's.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.errors import TransferError
from nbgpu.protocol.calls import Call
from nbgpu.serialization import sources
from nbgpu.serialization.parcels import Packing
from nbgpu.text.ranks import named_ranges


def is_local(value: Any) -> bool:
    """Whether a value is a function or a class that was defined in the notebook and not imported."""
    is_code = isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__")
    return is_code and getattr(value, "__module__", None) == "__main__"


def push(
    ranks: Ranks,
    chosen: Collection[int],
    values: Mapping[str, Any],
    send_data: Callable[[Mapping[str, Any]], None],
) -> list[str]:
    """Send functions, classes and data of the notebook to ranks, in an order in which the definitions work.

    Args:
        ranks: all ranks.
        chosen: the ranks that get the values.
        values: the values by name.
        send_data: sends values that are neither functions nor classes.

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
        send_data(data)
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
        send_data({name: value for name, value in data.items() if name in first})
    for name, value in closures.items():
        filename = value.__code__.co_filename
        _ask(ranks, chosen, Call.REMEMBER_SOURCE, filename, "".join(linecache.getlines(filename)))
        ranks.wait_for({rank: ranks[rank].push({name: value}, block=False) for rank in chosen})
    if definitions:
        _ask(ranks, chosen, Call.DEFINE, definitions)
    if rest := {name: value for name, value in data.items() if name not in first}:
        send_data(rest)
    return [
        f"{user} uses `{name}`, which {who}: {_remedy(name)}"
        for (user, name), who in _ranks_without_name(
            _ask(ranks, chosen, Call.FIND_LACKING_NAMES, definitions, list(closures))
        ).items()
    ]


def _ask(ranks: Ranks, chosen: Collection[int], what: Call, *arguments: Any) -> dict[int, Any]:
    return ranks.wait_for(ranks.call(what, *arguments, ranks=chosen))


def _ranks_without_name(by_rank: Mapping[int, Collection[tuple[str, str]]]) -> dict[tuple[str, str], str]:
    """The ranks that do not have a name, in words, by (the definition that uses it, name)."""
    lacking: dict[tuple[str, str], list[int]] = {}
    for rank, pairs in by_rank.items():
        for pair in pairs:
            lacking.setdefault(pair, []).append(rank)
    return {
        pair: "the ranks do not have"
        if len(without) == len(by_rank)
        else f"{named_ranges(without)} {'does' if len(without) == 1 else 'do'} not have"
        for pair, without in lacking.items()
    }


def _remedy(name: str) -> str:
    variables = vars(sys.modules["__main__"])
    if name not in variables:
        return f"define {name} first"
    value = variables[name]
    imported = isinstance(value, ModuleType) or (
        isinstance(value, FunctionType | type) and not is_local(value)
    )
    return "%nbgpu sync" if imported else f"%push {name}"
