"""The settings of a recipe that the user has written in a file, parsed from the file's text.

The file is not imported, because that would import torch, which the notebook's kernel and the command line
avoid.
"""

from __future__ import annotations

import ast
import io
import keyword
import sys
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE

BASE_CLASS = "OwnRecipe"
"""The base class of the recipe in the file (nbgpu/recipes/own/__init__.py)."""
_WHY_LOSSES_DIFFER = "why_losses_differ"
_TYPES: Mapping[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
_TEMPLATE = PACKAGE / "recipes" / "own" / "template.py.txt"
_MAX_FILES = 200
"""The largest number of files in a folder that are searched for recipes."""


@dataclass(frozen=True)
class Setting:
    """A line such as `hidden: int = 64  # width of the network` in the body of the recipe's class."""

    name: str
    annotation: Any
    """A type that pydantic accepts."""
    default: Any
    description: str


@dataclass(frozen=True)
class RecipeFile:
    """The content of a recipe's file."""

    path: Path
    class_name: str
    summary: str
    """The first line of the class's docstring, or of the file's."""
    settings: tuple[Setting, ...]
    methods: frozenset[str] = frozenset()
    """The names of the methods in the body of the class."""
    why_losses_differ: str = ""
    """A sentence why the loss of a validation is not comparable with the loss of a step; empty if it is."""


def is_file(recipe: str) -> bool:
    """Return whether a recipe's name is the path of a user's file."""
    return recipe.endswith(".py")


def read_text(path: Path) -> str:
    """Return the text of a file; OSError for a pipe or a device, because reading one might block forever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is not a plain file")
    return path.read_text()


def create(name: str) -> Path:
    """Write a new recipe file from the template, and return its path.

    Args:
        name: 'my_recipe' or 'folder/my_recipe.py'; an existing file is not overwritten.

    Raises:
        ConfigError: the name is not valid for a module, or the file exists.
    """
    # The paths '' and '/' have no name to which a suffix could be added.
    path = Path(name).with_suffix(".py") if Path(name).name else Path(name)
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem) or path.stem in sys.stdlib_module_names:
        raise ConfigError(
            f"{path.stem!r} cannot be the name of a recipe: take letters, digits and _, such as my_recipe"
        )
    class_name = "".join(part.capitalize() for part in path.stem.split("_") if part)
    try:
        with path.open("x") as file:
            file.write(_TEMPLATE.read_text().replace("MyRecipe", class_name).replace("my_recipe", path.stem))
    except OSError as error:
        raise ConfigError(f"{path} was not written: {error.strerror}") from None
    return path


def read(path: Path) -> RecipeFile:
    """Read the settings of the recipe in a file.

    Raises:
        ConfigError: the file cannot be read, does not have exactly one recipe, or has an invalid setting; the
            message names every invalid setting with its line.
    """
    try:
        text = read_text(path)
        module = ast.parse(text)
    except (OSError, ValueError, SyntaxError) as error:  # ValueError for a NUL or for what is no UTF-8
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None
    except (RecursionError, MemoryError):
        raise ConfigError(
            f"the recipe {path} cannot be read: too many brackets stand in one another"
        ) from None
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and _is_recipe(node)]
    if len(classes) != 1:
        names = ", ".join(node.name for node in classes) or "none"
        raise ConfigError(
            f"{path} must have one class of {BASE_CLASS} (from nbgpu.recipes.own); found: {names}. "
            "`nbgpu new NAME` writes a file to begin with"
        )
    (recipe,) = classes
    comments = _comments(text)
    methods = frozenset(_methods(recipe))
    settings, problems, why_losses_differ = [], [], ""
    for node in recipe.body:
        try:
            if _assigns(node, _WHY_LOSSES_DIFFER):
                why_losses_differ = _sentence(node.value)
            elif isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                setting = _setting(node, comments, path)
                settings.append(setting)
                if setting.name in methods:
                    raise ValueError(
                        f"{setting.name!r} is a setting here and a method below: leave one of them out"
                    )
        except ValueError as error:
            problems.append(f"{path}:{node.lineno}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    summary = (ast.get_docstring(recipe) or ast.get_docstring(module) or path.name).splitlines()[0]
    return RecipeFile(path, recipe.name, summary, tuple(settings), methods, why_losses_differ)


def in_folder(folder: Path) -> list[str]:
    """Return the files of a folder that have a valid recipe, in alphabetical order."""
    recipes = []
    for path in sorted(folder.glob("*.py"))[:_MAX_FILES]:
        # A file that cannot be read is left out.
        with suppress(OSError, UnicodeDecodeError, ConfigError):
            # Most files have no recipe, and this test saves parsing them.
            if BASE_CLASS in read_text(path):
                recipes.append(str(read(path).path))
    return recipes


def _assigns(node: ast.stmt, name: str) -> TypeGuard[ast.Assign | ast.AnnAssign]:
    """Return whether a statement gives this name a value, with or without an annotation."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return isinstance(target, ast.Name) and target.id == name


def _is_recipe(node: ast.ClassDef) -> bool:
    """Return whether a class extends OwnRecipe, also written as `own.OwnRecipe`."""
    return any(ast.unparse(base).rpartition(".")[2] == BASE_CLASS for base in node.bases)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a class's methods, including methods that are assigned: `schedule =
    Other.schedule`."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Attribute | ast.Name | ast.Lambda):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))


def _sentence(node: ast.expr | None) -> str:
    """Return the value of the attribute `why_losses_differ`; ValueError unless it is a literal text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(
        f"`{_WHY_LOSSES_DIFFER}` must be a text that stands there, such as "
        f"{_WHY_LOSSES_DIFFER} = 'The loss of a validation has no dropout.'"
    )


def _comments(text: str) -> Mapping[int, str]:
    """Return the comment of each line that has one, without its #, by line number."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _setting(node: ast.AnnAssign, comments: Mapping[int, str], path: Path) -> Setting:
    """Return the setting that a line of the class's body declares. Its value must be a literal, because the
    file is not run.

    Raises:
        ValueError: the type is not supported, or the value is missing or not a literal.
    """
    line = ast.unparse(node)
    how = (
        "A setting is an int, float, str, bool or Literal[...] with a plain value, such as `hidden: int = 64`; leave the "
        "type out where something is not a setting"
    )
    try:
        annotation = _annotation(node.annotation)
        default = ast.literal_eval(node.value) if node.value is not None else ...
    except (ValueError, TypeError):  # TypeError for a dict whose key is a list
        raise ValueError(f"`{line}` is not a setting. {how}") from None
    if not isinstance(node.target, ast.Name) or default is ...:
        raise ValueError(f"`{line}` has no value. {how}")
    description = comments.get(node.end_lineno or node.lineno, "") or f"a setting of {path.name}"
    return Setting(node.target.id, annotation, default, description)


def _annotation(node: ast.expr) -> Any:
    """Return the type that an annotation stands for: int, float, str, bool, Literal, or a union of these with
    `|`. Any other annotation is a ValueError."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _annotation(node.left) | _annotation(node.right)
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name) and node.id in _TYPES:
        return _TYPES[node.id]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Literal":
        choices = ast.literal_eval(node.slice)
        return Literal[choices if isinstance(choices, tuple) else (choices,)]
    raise ValueError(ast.unparse(node))
