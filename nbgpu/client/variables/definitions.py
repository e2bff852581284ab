"""Send functions and classes that were defined in the notebook to the ranks, as source.

A rank runs the source as if it were in a distributed cell. So a function finds its globals among the rank's
own variables, `super()` and decorators work, and tracebacks show its lines. Pickling by value would bring
copies of the notebook's globals along, which would then be neither the notebook's nor the rank's.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.ipykernel import shell as ipython_shell
from nbgpu.errors import TransferError
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import Definition
from nbgpu.serialization.parcels import Packing
from nbgpu.text.ranks import rank_ranges

Statement = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign


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
    sources = {name: found for name, value in code.items() if (found := find(name, value)) is not None}
    # A closure has no source that could be run by itself. Its code is sent with the values that it closes
    # over.
    closures = {name: value for name, value in code.items() if name not in sources}
    problems = [
        f"{name}: its source is not known. Define it in a cell, at the left margin"
        for name, value in closures.items()
        if not isinstance(value, FunctionType)
    ]
    definitions = list(sources.values())
    missing = _ask(ranks, chosen, Call.CHECK_DEFINITIONS, definitions)
    problems += [
        f"{user} cannot be defined without `{name}`, which {who}: {_remedy(name)}"
        for (user, name), who in _who_lacks(missing).items()
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
        _ask(ranks, chosen, Call.REMEMBER_SOURCE, filename, _lines_of(filename))
        ranks.wait_for({rank: ranks[rank].push({name: value}, block=False) for rank in chosen})
    if definitions:
        _ask(ranks, chosen, Call.DEFINE, definitions)
    if rest := {name: value for name, value in data.items() if name not in first}:
        send_data(rest)
    return [
        f"{user} uses `{name}`, which {who}: {_remedy(name)}"
        for (user, name), who in _who_lacks(
            _ask(ranks, chosen, Call.FIND_LACKING_NAMES, definitions, list(closures))
        ).items()
    ]


def _ask(ranks: Ranks, chosen: Collection[int], what: Call, *arguments: Any) -> dict[int, Any]:
    return ranks.wait_for(ranks.call(what, *arguments, ranks=chosen))


def _who_lacks(by_rank: Mapping[int, Collection[tuple[str, str]]]) -> dict[tuple[str, str], str]:
    """The ranks that do not have a name, in words, by (the definition that uses it, name)."""
    lacking: dict[tuple[str, str], list[int]] = {}
    for rank, pairs in by_rank.items():
        for pair in pairs:
            lacking.setdefault(pair, []).append(rank)
    return {
        pair: "the ranks do not have"
        if len(without) == len(by_rank)
        else f"rank {rank_ranges(without)} does not have"
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


def find(name: str, value: Any) -> Definition | None:
    """The source of a function or a class in the notebook; None where no single statement defines it."""
    made = inspect.unwrap(value)
    for filename, line in _places(made):
        cell = _lines_of(filename)
        for statement in _statements(cell):
            if _first_line(statement) <= line <= (statement.end_lineno or line) and _makes(statement, made):
                number = _cell_number(cell)
                return Definition(name, _name_of(statement), cell, number, _first_line(statement), _flags())
    # This finds wrappers without `__wrapped__` and classes without methods.
    for number, cell in reversed(list(enumerate(_cells()))):
        if name not in cell:
            continue
        for statement in reversed(list(_statements(cell))):
            if not isinstance(statement, ast.Assign) and _name_of(statement) == name:
                return Definition(name, name, cell, number, _first_line(statement), _flags())
    return None


def _places(made: Any) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of code that belongs to a function or a class."""
    if isinstance(made, FunctionType):
        yield made.__code__.co_filename, made.__code__.co_firstlineno
        return
    for member in vars(made).values():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        own = f"{made.__qualname__}."
        if isinstance(function, FunctionType) and function.__qualname__.startswith(own):
            yield function.__code__.co_filename, function.__code__.co_firstlineno


def _statements(cell: str) -> Iterator[Statement]:
    """Yield the statements at the left margin that define a function or a class."""
    try:
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree: ast.Module = compile(cell, "<cell>", "exec", flags, dont_inherit=True)
    except SyntaxError:
        return  # a cell that never ran
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Lambda)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            yield statement


def _makes(statement: Statement, made: Any) -> bool:
    if isinstance(statement, ast.Assign):
        return isinstance(made, FunctionType) and made.__qualname__ == "<lambda>"
    return bool(statement.name == made.__qualname__)


def _name_of(statement: Statement) -> str:
    if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        return target.id
    return statement.name


def _first_line(statement: Statement) -> int:
    decorators = [] if isinstance(statement, ast.Assign) else statement.decorator_list
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _lines_of(filename: str) -> str:
    """The text of a cell, by the file name under which IPython has compiled it."""
    return "".join(linecache.getlines(filename))


def _cell_number(cell: str) -> int:
    cells = _cells()
    text = cell.rstrip("\n")
    return next((n for n in range(len(cells) - 1, 0, -1) if cells[n].rstrip("\n") == text), 0)


def _flags() -> int:
    """The compiler flags of `from __future__ import ...` in earlier cells."""
    known = 0
    for feature in __future__.all_feature_names:
        known |= getattr(__future__, feature).compiler_flag
    shell: Any = ipython_shell.current()
    return 0 if shell is None else int(shell.compile.flags & known)


def _cells() -> list[str]:
    """The cells that ran, indexed by their number in the notebook; none in a script."""
    shell: Any = ipython_shell.current()
    return [] if shell is None else list(shell.history_manager.input_hist_parsed)
