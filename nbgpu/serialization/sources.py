"""Find the source of functions and classes that were defined in cells, and the statements that assigned
variables."""

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
    """Return the cells that ran, indexed by their number; an empty list in a script."""
    return [] if shell is None else list(shell.history_manager.input_hist_parsed)


def parse_cell(cell: str) -> ast.Module:
    """Parse a cell, in which `await` is allowed at the top level; a cell that is not valid Python, and so
    never ran, is parsed as empty."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree: ast.Module = compile(cell, "<cell>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
    return tree


def find(name: str, value: Any, shell: Any) -> Definition | None:
    """Return the source of a function or class that a cell of this process has defined; None if no single
    statement defines it.

    Args:
        name: the variable with the function or class.
        value: the function or class.
        shell: the IPython shell that ran the cells; None in a script.
    """
    target = inspect.unwrap(value)
    for filename, line in _positions(target):
        # IPython stores the text of a cell in linecache.
        cell = "".join(linecache.getlines(filename))
        for statement in _statements(cell):
            first = first_line(statement)
            if first <= line <= (statement.end_lineno or line) and _defines(statement, target):
                number = _cell_number(cell, shell)
                return Definition(name, _name_of(statement), cell, number, first, _flags(shell))
    # Wrappers without `__wrapped__`, and classes without methods, are found by their name.
    for number, cell in reversed(list(enumerate(cells(shell)))):
        if name not in cell:
            continue
        for statement in reversed(list(_statements(cell))):
            if not isinstance(statement, ast.Assign) and _name_of(statement) == name:
                return Definition(name, name, cell, number, first_line(statement), _flags(shell))
    return None


def statement_that_made(name: str, shell: Any) -> str:
    """Return the first line and the position of the newest top-level statement of a cell that assigned a
    variable: 'it = iter(loader)  (cell 3, line 2)'; empty if there is none."""
    for number, cell in reversed(list(enumerate(cells(shell)))):
        if name not in cell:
            continue
        for statement in reversed(parse_cell(cell).body):
            if name in _assigned_by(statement):
                text = cell.splitlines()[statement.lineno - 1].strip()
                return f"{text}  (cell {number}, line {statement.lineno})"
    return ""


def _assigned_by(statement: ast.stmt) -> set[str]:
    """Return the names that a statement, or a statement within it, assigns."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _positions(target: Any) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of a function, or of the methods that a class defines itself."""
    if isinstance(target, FunctionType):
        yield target.__code__.co_filename, target.__code__.co_firstlineno
        return
    for member in vars(target).values():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{target.__qualname__}."):
            yield function.__code__.co_filename, function.__code__.co_firstlineno


def _statements(cell: str) -> Iterator[Statement]:
    """Yield the top-level statements of a cell that define a function, a lambda or a class."""
    for statement in parse_cell(cell).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Lambda)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            yield statement


def _defines(statement: Statement, target: Any) -> bool:
    """Return whether a statement can be the definition of a function or class, by its name."""
    if isinstance(statement, ast.Assign):
        return isinstance(target, FunctionType) and target.__qualname__ == "<lambda>"
    return bool(statement.name == target.__qualname__)


def _name_of(statement: Statement) -> str:
    """Return the name that a statement of `_statements` defines."""
    if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        return target.id
    return statement.name


def first_line(statement: ast.stmt) -> int:
    """Return the first line of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _cell_number(cell: str, shell: Any) -> int:
    """Return the number of the newest cell with this text; 0 if there is none."""
    history = cells(shell)
    text = cell.rstrip("\n")
    return next((n for n in range(len(history) - 1, 0, -1) if history[n].rstrip("\n") == text), 0)


def _flags(shell: Any) -> int:
    """Return the compiler flags of `from __future__ import ...` in earlier cells."""
    future_flags = 0
    for feature in __future__.all_feature_names:
        future_flags |= getattr(__future__, feature).compiler_flag
    return 0 if shell is None else int(shell.compile.flags & future_flags)
