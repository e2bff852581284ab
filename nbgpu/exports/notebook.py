"""Make a script for torchrun from the distributed cells of a notebook, without running the notebook.

Each distributed cell becomes a part of the script. A plain cell becomes a part if a later part uses a name
that the cell defines. A note names each cell that is left out.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from nbgpu.errors import ConfigError
from nbgpu.protocol.records import GIVEN_NAMES
from nbgpu.text.ranks import parse_ranges

_CELL_MAGIC = "%%distributed"
_DEFINED = {*GIVEN_NAMES, *dir(builtins), "__name__", "__file__"}
"""The names that every script defines."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_ANY_NAME = "*"
"""What `from module import *` defines."""
_CONDITIONAL = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)
"""Statements with parts that may not be executed."""

_HEAD = resources.files("nbgpu.exports") / "templates" / "cells.py.txt"
_TAIL = "\ndist.destroy_process_group()\n"


@dataclass(frozen=True)
class Script:
    """A script for torchrun, with notes about the parts of the notebook that are not in it."""

    text: str
    notes: Sequence[str]


@dataclass(frozen=True)
class _Cell:
    """One code cell of the notebook."""

    number: int
    """The number of the cell, counted from 1 over all cells of the notebook."""
    code: str
    """The code without magics, which a script cannot have."""
    tree: ast.Module | None
    """The parsed code; None if it cannot be a part of a script."""
    is_distributed: bool
    ranks: tuple[int, ...] | None
    """The ranks that run a distributed cell; None for all."""
    notes: Sequence[str]
    """Sentences about what does not carry over."""

    @property
    def stores(self) -> set[str]:
        """The names that the cell may define."""
        return set() if self.tree is None else set(_stored(self.tree.body))

    @property
    def surely_stores(self) -> set[str]:
        """The names that the cell defines on every rank in any case, so that an earlier definition is not
        needed."""
        return set() if self.tree is None or self.ranks is not None else set(_surely_stored(self.tree.body))

    @property
    def changes(self) -> set[str]:
        """The names that the cell changes by a statement such as `lr *= 2`, or deletes."""
        return set() if self.tree is None else set(_changed(self.tree))

    @property
    def loads(self) -> set[str]:
        """The names that the cell uses, without those that every script defines."""
        if self.tree is None:
            return set()
        used = set(_used(symtable.symtable(self.code, "cell", "exec")))
        # symtable does not count a change as a use.
        return (used | self.changes) - _DEFINED

    @property
    def is_about_cluster(self) -> bool:
        """Whether a plain cell uses nbgpu, whose cluster a script does not have."""
        if self.tree is None:
            return False
        imported = {
            name.split(".")[0]
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
        }
        return "nbgpu" in self.loads | imported


def build_script(path: Path) -> Script:
    """Return the script of a notebook.

    Raises:
        ConfigError: the file is no notebook, or has no distributed cell that a script can have.
    """
    cells = list(_cells(path))
    if not any(cell.is_distributed for cell in cells):
        raise ConfigError(f"{path} has no cell that begins with {_CELL_MAGIC}: there is nothing to export")
    exported = _exported(cells)
    if not any(cell.is_distributed for cell in exported):
        raise ConfigError(
            "\n".join([f"{path}: none of its distributed cells can be in a script:", *_notes(cells)])
        )
    numbers = {cell.number for cell in exported}
    defined: set[str] = set()
    missing = []
    for cell in exported:
        lacking = sorted(cell.loads - cell.stores - defined)
        if lacking and _ANY_NAME not in defined | cell.stores:
            missing.append(
                f"cell {cell.number} uses {', '.join(lacking)}, which no earlier part of the script defines"
            )
        defined |= cell.stores
    left_out = [
        f"cell {cell.number} stays behind: "
        + (
            "it is about the notebook's cluster"
            if cell.is_about_cluster
            else "no distributed cell uses what it defines"
        )
        for cell in cells
        if cell.number not in numbers and not cell.is_distributed and cell.code.strip()
    ]
    parts = [_part(cell) for cell in exported]
    notes = sorted([*_notes(cells), *left_out], key=lambda note: int(re.search(r"\d+", note)[0]))  # type: ignore[index]
    notes += [
        *missing,
        "The script writes no checkpoints by itself: started again, it begins with its first line",
    ]
    return Script(_HEAD.read_text().replace("@NOTEBOOK@", path.name) + "".join(parts) + _TAIL, notes)


def _notes(cells: Sequence[_Cell]) -> list[str]:
    """Return the notes of all cells, each with the number of its cell."""
    return [f"cell {cell.number}: {note}" for cell in cells for note in cell.notes]


def _exported(cells: Sequence[_Cell]) -> list[_Cell]:
    """Return the cells that become parts of the script: the distributed cells, and the plain cells whose
    names these need. The cells are gone through backwards, because the needed names are then known at each
    cell."""
    needed: set[str] = set()
    exported: list[_Cell] = []
    for cell in reversed(cells):
        if cell.tree is None or not cell.code.strip():
            continue
        defines_needed = not needed.isdisjoint(cell.stores | cell.changes) or (
            bool(needed) and _ANY_NAME in cell.stores
        )
        is_needed = defines_needed and not cell.is_about_cluster
        if cell.is_distributed or is_needed:
            needed = (needed - cell.surely_stores) | cell.loads
            exported.insert(0, cell)
    return exported


def _part(cell: _Cell) -> str:
    """Return a cell as a part of the script, in an `if` statement if only some ranks run it."""
    kind = "" if cell.is_distributed else ", a plain cell whose names the ranks use"
    code = cell.code.strip("\n")
    if cell.ranks is not None:
        code = f"if rank in {sorted(cell.ranks)}:\n{textwrap.indent(code, '    ')}"
    return f"\n# ---- cell {cell.number}{kind} ----\n{code}\n"


def _cells(path: Path) -> Iterator[_Cell]:
    """Yield the code cells of a notebook.

    Raises:
        ConfigError: the file cannot be read, or is not a notebook.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        sources = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in notebook["cells"]]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a notebook") from None
    for number, (source, is_code) in enumerate(sources, 1):
        if is_code:
            yield _cell(number, source)


def _cell(number: int, source: str) -> _Cell:
    """Parse one code cell: read the options of its magic, and remove what a script cannot have. The notes of
    the cell name what was removed."""
    lines = source.splitlines()
    code_lines = ((i, line) for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    index, first = next(code_lines, (0, ""))
    notes: list[str] = []
    ranks: tuple[int, ...] | None = None
    is_distributed = first.split()[:1] == [_CELL_MAGIC]
    if is_distributed:
        ranks = _ranks_of_magic(first, notes)
        lines = lines[index + 1 :]
    elif first.startswith("%%"):
        return _Cell(
            number, "", None, False, None, [f"{first.split()[0]} does not carry over, nor what is below it"]
        )
    code, tree = _python(lines, notes)
    if tree is not None:
        if any(
            isinstance(node, ast.Call) and getattr(node.func, "id", "") == "input" for node in ast.walk(tree)
        ):
            notes.append("left out, because it asks with input(), and nobody answers a job")
            tree = None
        elif ranks is not None and not _can_be_indented(code, tree):
            notes.append("left out, because --ranks would indent a string of several lines")
            tree = None
    return _Cell(number, code, tree, is_distributed, ranks, notes)


def _can_be_indented(code: str, tree: ast.Module) -> bool:
    """Return whether code has the same meaning in an `if` statement. Code with a string of several lines has
    not, because the lines of the string would be indented."""
    inner = ast.parse("if 1:\n    pass\n" + textwrap.indent(code, "    ")).body[0]
    assert isinstance(inner, ast.If), "the text begins with an if"
    return [ast.dump(node) for node in inner.body[1:]] == [ast.dump(node) for node in tree.body]


def _ranks_of_magic(line: str, notes: list[str]) -> tuple[int, ...] | None:
    """Return the ranks in the option --ranks of a magic's line, None for all, and add a note for each other
    option."""
    arguments = line.split()[1:]
    ranks: tuple[int, ...] | None = None
    for index, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == "--ranks":
            text = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
            try:
                ranks = tuple(parse_ranges(text))
            except ValueError:
                notes.append(f"--ranks {text} is not understood: the cell is for all ranks in the script")
                return None
        elif name.startswith("--"):
            notes.append(f"{name} does not carry over")
    return ranks


def _python(lines: Sequence[str], notes: list[str]) -> tuple[str, ast.Module | None]:
    """Return (the code, its syntax tree). Line magics, shell commands and `name?` are made comments, with a
    note for each. Code that is no plain Python even so has None for a tree, and a note with the reason."""
    code = "\n".join(lines)
    try:
        ast.parse(code)
    except SyntaxError:
        code = _comment_out_magics(lines, notes)
    try:
        tree = ast.parse(code)
        compile(tree, "<cell>", "exec")  # refuses an await outside of a function, which the parser takes
    except SyntaxError as error:
        is_async = re.search("await|async", error.msg)
        reason = "uses await outside of a function" if is_async else f"is no plain Python ({error.msg})"
        notes.append(f"left out, because it {reason}")
        return code, None
    return code, tree


def _comment_out_magics(lines: Sequence[str], notes: list[str]) -> str:
    """Return code in which line magics, shell commands and `name?` are comments, and add a note for each."""
    kept = []
    for line in lines:
        magic = re.match(r"\s*([%!]+\S*)", line)
        if magic is None and not re.match(r"\s*[\w.]+\?{1,2}\s*$", line):
            kept.append(line)
            continue
        notes.append(f"{line.strip()} does not carry over")
        # An indented block must not become empty.
        kept.append(
            re.sub(r"\S.*", lambda rest: f"pass  # {rest[0]}", line, count=1)
            if line[:1].isspace()
            else f"# {line}"
        )
    return "\n".join(kept)


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that a cell uses, also in its functions."""
    for symbol in table.get_symbols():
        # symtable marks names assigned at module level as local, not global.
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _used(inner)


def _changed(scope: ast.AST) -> Iterator[str]:
    """Yield the global names that a scope, or a function in it, changes by a statement such as `+=`, or
    deletes. Both need an earlier definition, but symtable does not count them as uses."""
    nodes = list(_within(scope))
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    for node in nodes:
        target: ast.AST
        if isinstance(node, _SCOPES):
            yield from _changed(node)
        if isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            target = node
        else:
            continue
        if isinstance(target, ast.Name) and (isinstance(scope, ast.Module) or target.id in declared):
            yield target.id


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those inside the functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _within(node)


def _surely_stored(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the global names that statements define in any case, which excludes branches, loops and `try`."""
    for statement in statements:
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield from _surely_stored(statement.body)
        elif not isinstance(statement, _CONDITIONAL):
            yield from _stored([statement])


def _stored(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the global names that statements may define; `_ANY_NAME` for `from module import *`."""
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            # Its variables are its own, but for those of `:=`.
            yield from (inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            continue
        if isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        if isinstance(node, ast.AugAssign):
            waiting.append(node.value)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        waiting += ast.iter_child_nodes(node)
