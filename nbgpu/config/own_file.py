"""The settings of a recipe that the user has written in a file, read from its text.

The file is not run for that, because it imports torch, and the notebook's kernel and the command line do not.
"""

from __future__ import annotations

import ast
import io
import keyword
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE

BASE_CLASS = "OwnRecipe"
"""The base class of the recipe in the file (nbgpu/recipes/own/__init__.py)."""
_SENTENCE = "why_losses_differ"
_TYPES: Mapping[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


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
    """Whether a recipe's name is the path of the user's own file."""
    return recipe.endswith(".py")


def read_text(path: Path) -> str:
    """The text of a file; OSError where it is a pipe or a device, because reading one might block for
    ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is not a plain file")
    return path.read_text()


_TEMPLATE = PACKAGE / "recipes" / "own" / "template.py.txt"


def create(name: str) -> Path:
    """Write a recipe to start from, and return its file.

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
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
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
    comments = _comments(text)
    methods = frozenset(_methods(classes[0]))
    settings, problems = [], []
    for node in classes[0].body:
        if not isinstance(node, ast.AnnAssign) or _is_class_variable(node):
            continue
        try:
            setting = _setting(node, comments, path)
        except ValueError as error:
            problems.append(f"{path}:{node.lineno}: {error}")
            continue
        settings.append(setting)
        if setting.name in methods:
            problems.append(
                f"{path}:{node.lineno}: {setting.name!r} is a setting here and a method below: leave one of them out"
            )
    try:
        why_losses_differ = _sentence(classes[0], path)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    summary = (ast.get_docstring(classes[0]) or ast.get_docstring(module) or path.name).splitlines()[0]
    return RecipeFile(path, classes[0].name, summary, tuple(settings), methods, why_losses_differ)


_MOST_FILES = 200
"""The most files of a folder that are looked into for recipes."""


def in_folder(folder: Path) -> list[str]:
    """The files of a folder that have a recipe which can be used, in alphabetical order."""
    recipes = []
    for path in sorted(folder.glob("*.py"))[:_MOST_FILES]:
        try:
            # Most files have none, and need not be parsed for that.
            if BASE_CLASS in read_text(path):
                recipes.append(str(read(path).path))
        except (OSError, UnicodeDecodeError, ConfigError):
            continue  # it is offered when it can be read
    return recipes


def _is_recipe(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == BASE_CLASS for base in node.bases)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a class's methods, also of those that it takes from elsewhere: `schedule =
    Other.schedule`."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Attribute | ast.Name | ast.Lambda):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))


def _sentence(node: ast.ClassDef, path: Path) -> str:
    """Return the text that a class gives its attribute `why_losses_differ`; empty where it has none."""
    for part in node.body:
        if isinstance(part, ast.Assign) and [ast.unparse(target) for target in part.targets] == [_SENTENCE]:
            try:
                value = ast.literal_eval(part.value)
            except (ValueError, TypeError):
                value = None
            if not isinstance(value, str):
                raise ValueError(
                    f"{path}:{part.lineno}: `{_SENTENCE}` must be a text that stands there, such as "
                    f"{_SENTENCE} = 'The loss of a validation has no dropout.'"
                )
            return value
    return ""


def _is_class_variable(node: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(node.annotation)


def _comments(text: str) -> Mapping[int, str]:
    """The text after the #, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _setting(node: ast.AnnAssign, comments: Mapping[int, str], path: Path) -> Setting:
    """Return the setting that a line of the class's body declares. The value is read as a literal, because
    the file is not run.

    Raises:
        ValueError: the line is no setting: the type is another one, or the value is no literal or missing.
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
