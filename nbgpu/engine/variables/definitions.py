"""Functions and classes of the notebook, defined on this rank from their source."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from nbgpu.engine.ipykernel import shell
from nbgpu.protocol.records import Definition
from nbgpu.serialization.sources import first_line

_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
"""The names of the code of comprehensions, which before Python 3.12 is that of a function."""


def check(definitions: Sequence[Definition]) -> list[tuple[str, str]]:
    """Return (definition, name) for each name that is missing on this rank and is looked up while the
    definition runs: a base class, a decorator or a default. The names of these definitions count as
    present."""
    defined = {name for d in definitions for name in (d.name, d.defines)}
    return [
        (definition.name, name)
        for definition in definitions
        for name in sorted(needed_at_once(definition) - defined)
        if not _is_there(name)
    ]


def needed_at_once(definition: Definition) -> set[str]:
    """Return the names that are looked up while a definition runs: base classes, decorators, defaults."""
    return _needed_at_once(_code(definition, "<definition>"))


def define(definitions: Sequence[Definition]) -> None:
    """Run the definitions, each after those that it needs."""
    variables = shell.current().user_ns
    for definition in _in_order(definitions):
        filename = shell.current().compile.cache(definition.cell, definition.cell_number)
        # The locals are a new dict, so that a definition under a second name changes no variable of its own
        # name.
        made: dict[str, Any] = {}
        exec(_code(definition, filename), variables, made)
        variables[definition.name] = made[definition.defines]


def lacking(definitions: Sequence[Definition], closures: Sequence[str]) -> list[tuple[str, str]]:
    """Return (function or class, name) for each missing global name that the function, or a method, looks up
    when it is called.

    Args:
        definitions: functions and classes that were sent as source.
        closures: the names of functions that were sent as code objects.
    """
    variables = shell.current().user_ns
    uses = {d.name: set(_used_later(_code(d, "<definition>"))) for d in definitions}
    uses |= {name: set(_global_names(variables[name].__code__)) for name in closures}
    return [(user, name) for user, names in uses.items() for name in sorted(names) if not _is_there(name)]


def remember_source(filename: str, text: str) -> None:
    """Let tracebacks and `inspect.getsource` show the source of code objects that were sent."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def _in_order(definitions: Sequence[Definition]) -> Iterator[Definition]:
    """Yield the definitions so that each comes after those that it needs while it runs. If definitions need
    one another in a circle, the first one of them comes first."""
    left = list(definitions)
    while left:
        names = {d.defines for d in left} | {d.name for d in left}
        ready = [d for d in left if not needed_at_once(d) & (names - {d.name, d.defines})]
        for definition in ready or left:
            yield definition
            left.remove(definition)
            if not ready:
                break


def _code(definition: Definition, filename: str) -> CodeType:
    """Compile the definition's statement alone, with the line numbers that it has in its cell, so that
    tracebacks show the right lines."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree: Any = compile(definition.cell, filename, "exec", flags, dont_inherit=True)
    (statement,) = [s for s in tree.body if first_line(s) == definition.line]
    module = ast.Module([statement], [])
    code: CodeType = compile(module, filename, "exec", definition.flags, dont_inherit=True)
    return code


def _needed_at_once(code: CodeType) -> set[str]:
    """Return the names that are looked up while a statement runs: also in the bodies of classes and in
    comprehensions, and not in the bodies of functions."""
    made = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_NAME", "STORE_GLOBAL")}
    needed = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_NAME", "LOAD_GLOBAL")} - made
    for inner in _inner_codes(code):
        if inner.co_name in _COMPREHENSIONS:
            needed |= set(_global_names(inner))
        # The body of a class runs at once, that of a function later: only functions have optimised locals.
        elif not inner.co_flags & inspect.CO_OPTIMIZED:
            needed |= _needed_at_once(inner) - made
    return needed - {"__name__", "__module__", "__qualname__"}


def _used_later(code: CodeType) -> Iterator[str]:
    """Yield the globals that the functions in a statement, also those in the bodies of classes, use when they
    are called."""
    for inner in _inner_codes(code):
        if inner.co_flags & inspect.CO_OPTIMIZED:
            yield from _global_names(inner)
        else:
            yield from _used_later(inner)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function, or one inside it, looks up when it is called."""
    instructions = list(dis.get_instructions(code))
    # A global that the function itself assigns exists once the function has run.
    assigned = {i.argval for i in instructions if i.opname == "STORE_GLOBAL"}
    yield from (i.argval for i in instructions if i.opname == "LOAD_GLOBAL" and i.argval not in assigned)
    for inner in _inner_codes(code):
        yield from _global_names(inner)


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _is_there(name: str) -> bool:
    return name in shell.current().user_ns or hasattr(builtins, name)
