"""Find the source of functions and classes that cells have defined, and the statements that made values."""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from nbgpu.protocol.records import Definition

Statement = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign


def cells(shell: Any) -> list[str]:
    """The cells that ran, indexed by their number; none in a script."""
    return [] if shell is None else list(shell.history_manager.input_hist_parsed)


def parse_cell(cell: str) -> ast.Module:
    """Parse a cell, whose statements may await; a cell that is not Python, and so never ran, has none."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree: ast.Module = compile(cell, "<cell>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
    return tree


def find(name: str, value: Any, shell: Any) -> Definition | None:
    """The source of a function or a class that a cell of this process defined; None where no single
    statement defines it.

    Args:
        name: the variable that holds it.
        value: the function or the class.
        shell: the IPython shell that ran the cells; None in a script.
    """
    made = inspect.unwrap(value)
    for filename, line in _places(made):
        cell = _lines_of(filename)
        for statement in _statements(cell):
            if first_line(statement) <= line <= (statement.end_lineno or line) and _makes(statement, made):
                number = _cell_number(cell, shell)
                return Definition(
                    name, _name_of(statement), cell, number, first_line(statement), _flags(shell)
                )
    # This finds wrappers without `__wrapped__` and classes without methods.
    for number, cell in reversed(list(enumerate(cells(shell)))):
        if name not in cell:
            continue
        for statement in reversed(list(_statements(cell))):
            if not isinstance(statement, ast.Assign) and _name_of(statement) == name:
                return Definition(name, name, cell, number, first_line(statement), _flags(shell))
    return None


def statement_that_made(name: str, shell: Any) -> str:
    """Return the first line of the newest statement at the left margin of a cell that assigned a variable,
    with its position: 'it = iter(loader)  (cell 3, line 2)'; empty if there is none."""
    for number, cell in reversed(list(enumerate(cells(shell)))):
        if name not in cell:
            continue
        for statement in reversed(parse_cell(cell).body):
            if name in _assigned_by(statement):
                text = cell.splitlines()[statement.lineno - 1].strip()
                return f"{text}  (cell {number}, line {statement.lineno})"
    return ""


def _assigned_by(statement: ast.stmt) -> set[str]:
    """The names that a statement assigns itself, or in the blocks that it has."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


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
    for statement in parse_cell(cell).body:
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


def first_line(statement: ast.stmt) -> int:
    """Return the line at which a statement begins: its first decorator's, if it has some."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _lines_of(filename: str) -> str:
    """The text of a cell, by the file name under which IPython has compiled it."""
    return "".join(linecache.getlines(filename))


def _cell_number(cell: str, shell: Any) -> int:
    known = cells(shell)
    text = cell.rstrip("\n")
    return next((n for n in range(len(known) - 1, 0, -1) if known[n].rstrip("\n") == text), 0)


def _flags(shell: Any) -> int:
    """The compiler flags of `from __future__ import ...` in earlier cells."""
    known = 0
    for feature in __future__.all_feature_names:
        known |= getattr(__future__, feature).compiler_flag
    return 0 if shell is None else int(shell.compile.flags & known)
