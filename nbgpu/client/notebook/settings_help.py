"""Tab and Shift-Tab in calls of nbgpu that take settings as keyword arguments: their names, values and help.

`cluster.train("autoencoder", ba` is completed if the notebook's variable `cluster` is a Cluster. The call is
parsed from incomplete text, because the user is still typing it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

from IPython.core import completer
from IPython.core.getipython import get_ipython
from pydantic import BaseModel

from nbgpu.client.cluster.cluster import Cluster, current, current_or_none
from nbgpu.client.runs.run import Run
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, presets, settings_of, signatures
from nbgpu.config.prediction import PredictConfig
from nbgpu.config.settings import steerable
from nbgpu.errors import ConfigError
from nbgpu.planning.studies import StudyConfig
from nbgpu.planning.trials import SweepConfig

_CALLEE = re.compile(r"((?:[A-Za-z_]\w*(?:\(\))?\.)*[A-Za-z_]\w*)\s*$")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*")
_STRING = re.compile(r"\s*[rR]?(\"|')(.*?)\1\s*", re.DOTALL)
_PAIRS = {")": "(", "]": "[", "}": "{"}

_RECIPE_CALLS: Mapping[str, tuple[type[BaseModel], ...]] = {
    "train": (),
    "plan": (),
    "find_batch_size": (),
    "sweep": (SweepConfig, ClusterConfig),
    "scaling": (StudyConfig, ClusterConfig),
    "study": (StudyConfig, ClusterConfig),
    "controls": (),
}
"""The settings that a call takes in addition to the recipe's, for each call whose first argument is a
recipe."""
_CLUSTER_METHODS = ("train", "plan", "find_batch_size")
_PRIORITY = 1000
"""Higher than that of IPython's own matchers, so that this matcher can suppress them."""


@dataclass
class _Bracket:
    """An open bracket, with the positions of the commas within it."""

    kind: str
    begin: int
    commas: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class OpenCall:
    """The call that the cursor is in."""

    callee: str
    """The text of the called expression, such as 'cluster.train' or 'nbgpu.current().train'."""
    arguments: tuple[str, ...]
    """The text of the arguments before the one that the cursor is in."""
    typed: str
    """The text of that argument up to the cursor."""
    in_string: bool
    """Whether the cursor is in a string."""

    @property
    def first_string(self) -> str | None:
        """The first argument, if it is a string and the cursor is behind it."""
        match = _STRING.fullmatch(self.arguments[0]) if self.arguments else None
        return match[2] if match else None

    @property
    def keywords(self) -> set[str]:
        """The names of the keyword arguments before the cursor's."""
        return {match[1] for argument in self.arguments if (match := _KEYWORD.match(argument))}

    @property
    def keyword(self) -> str:
        """The name of the keyword argument that the cursor is in; empty if it has none yet."""
        match = _KEYWORD.match(self.typed)
        return match[1] if match else ""

    @property
    def begun_string(self) -> str:
        """The string that the cursor is in, up to the cursor."""
        return re.split(r"[\"']", self.typed)[-1] if self.in_string else ""


def open_call(text: str) -> OpenCall | None:
    """Return the innermost call that is open at the end of a text; None if no bracket of a call is open."""
    # Find the brackets that are open at the end of the text, with their commas. Skip strings and comments.
    stack: list[_Bracket] = []
    position = 0
    in_string = False
    while position < len(text):
        char = text[position]
        if char in "\"'":
            quote = text[position : position + 3]
            quote = quote if quote in ('"""', "'''") else char
            end = _end_of_string(text, position + len(quote), quote)
            if end is None:
                in_string = True
                break
            position = end
            continue
        if char == "#":
            position = text.find("\n", position)
            if position < 0:
                return None  # the cursor is in a comment
            continue
        if char in "([{":
            stack.append(_Bracket(char, position))
        elif char in ")]}":
            if not stack or stack.pop().kind != _PAIRS[char]:
                stack.clear()
        elif char == "," and stack:
            stack[-1].commas.append(position)
        position += 1
    if not stack or stack[-1].kind != "(" or (callee := _CALLEE.search(text[: stack[-1].begin])) is None:
        return None
    # The last bracket is the call's, and its commas separate the arguments.
    cuts = [stack[-1].begin, *stack[-1].commas]
    arguments = tuple(text[begin + 1 : end] for begin, end in pairwise(cuts))
    return OpenCall(callee[1], arguments, text[cuts[-1] + 1 :], in_string)


def _end_of_string(text: str, position: int, quote: str) -> int | None:
    """Return the position behind a string's closing quote; None if the text ends within the string.

    Args:
        text: the text.
        position: the position behind the opening quote.
        quote: the opening quote, of one or three characters.
    """
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text.startswith(quote, position):
            return position + len(quote)
        elif text[position] == "\n" and len(quote) == 1:
            return position  # a string that was never closed ends with its line
        else:
            position += 1
    return None


@dataclass(frozen=True)
class _Signature:
    """The arguments that a call takes."""

    callee: str
    settings: Mapping[str, type[BaseModel]]
    """For each keyword argument that is a setting, the class that has it as a field."""
    values: Mapping[str, tuple[str, ...]]
    """The possible texts of keyword arguments that are no settings, by name."""
    num_positional: int = 0
    """The number of positional arguments, which come first."""
    first: tuple[str, ...] = ()
    """The possible texts of the first argument."""
    title: str = ""
    """The first arguments in the heading of the call's help."""


def has_matchers() -> bool:
    """Whether IPython gives its matchers the whole cell, as it does from 8.6 on."""
    return hasattr(completer, "CompletionContext")


def install(shell: Any) -> None:
    """Have this shell's Tab complete the settings. A repeated call does no harm, and before IPython 8.6 this
    has no effect."""
    if has_matchers() and _complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_complete)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    if _complete in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_complete)


def _complete(context: Any) -> Any:
    """Complete the settings of the call that the cursor is in. This is a matcher of IPython's API version 2,
    which suppresses the other matchers if it has completions."""
    lines = context.full_text.split("\n")
    text = "\n".join([*lines[: context.cursor_line], context.text_until_cursor])
    shell = get_ipython()
    fragment, matches = completed(text, {} if shell is None else shell.user_ns)
    return completer.SimpleMatcherResult(
        completions=[completer.SimpleCompletion(text=match, type="param") for match in matches],
        matched_fragment=fragment,
        suppress=bool(matches),
    )


if has_matchers():
    _complete = completer.completion_matcher(api_version=2, identifier="nbgpu.settings", priority=_PRIORITY)(
        _complete
    )


def completed(text: str, variables: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (the begun word in a call of nbgpu, the texts that can complete it); no texts in other calls.

    Args:
        text: the cell up to the cursor.
        variables: the variables of the notebook.
    """
    call = open_call(text)
    signature = _signature(call, variables) if call is not None else None
    if call is None or signature is None:
        return "", []
    # In a string the value of an argument is completed.
    begun = call.begun_string
    if call.in_string:
        if model := signature.settings.get(call.keyword):
            values = signatures.choices_of(model.model_fields[call.keyword])
        elif call.keyword:
            values = signature.values.get(call.keyword, ())
        else:
            values = signature.first if not call.arguments else ()
        return begun, [value for value in values if value.startswith(begun)]
    # Elsewhere the first argument is offered as a whole, or the name of a keyword argument is completed.
    name = call.typed.lstrip()
    if not call.arguments and not name and signature.first:
        return "", [f'"{value}"' for value in signature.first]
    if len(call.arguments) < signature.num_positional or not re.fullmatch(r"\w*", name):
        return "", []
    others = [other for other in (*signature.values, *signature.settings) if other not in call.keywords]
    return name, [f"{other}=" for other in others if other.startswith(name)]


def help_at(text: str, rest: str, variables: Mapping[str, Any]) -> str:
    """Return the help for the setting at the cursor, or for all settings of the call that the cursor is in;
    empty if the call is not one of nbgpu.

    Args:
        text: the cell up to the cursor.
        rest: the text behind the cursor.
        variables: the variables of the notebook.
    """
    call = open_call(text)
    signature = _signature(call, variables) if call is not None else None
    if call is None or signature is None or len(call.arguments) < signature.num_positional:
        return ""
    behind = re.match(r"\w*", rest)
    at_cursor = call.keyword or call.typed.strip() + (behind[0] if behind else "")
    helps = {name: signatures.listed(model, [name]) for name, model in signature.settings.items()}
    if at_cursor in helps:
        return helps[at_cursor]
    return "\n".join([f"{signature.callee}({signature.title}", *helps.values(), ")"])


def _signature(call: OpenCall, variables: Mapping[str, Any]) -> _Signature | None:
    """Return the arguments of a call of nbgpu: a method of a cluster or a run, or a function of the package;
    None for any other call."""
    base, _, name = call.callee.rpartition(".")
    owner = _value(base, variables)
    if name in _RECIPE_CALLS and _is_nbgpu_call(name, base, owner, variables):
        return _recipe_call(call, name)
    if name == "set" and isinstance(owner, Run):
        return _Signature(call.callee, _settings(type(owner.config), steerable(type(owner.config))), {})
    if name == "predict" and isinstance(owner, Cluster):
        run = _value(call.arguments[0].strip(), variables) if call.arguments else None
        from_run = _settings(type(run.config), run.config.AT_PREDICTION) if isinstance(run, Run) else {}
        return _Signature(call.callee, {**_settings(PredictConfig), **from_run}, {}, num_positional=1)
    if name == "Cluster" and _is_nbgpu_call(name, base, owner, variables):
        return _Signature(call.callee, _settings(ClusterConfig), {})
    return None


def _is_nbgpu_call(name: str, base: str, owner: Any, variables: Mapping[str, Any]) -> bool:
    """Whether a call is one of nbgpu: a method of a Cluster, or a function of the package.

    Args:
        name: the name of the called function.
        base: the text before its dot, such as 'nbgpu'; empty if there is none.
        owner: the value of `base`.
        variables: the variables of the notebook.
    """
    if name in _CLUSTER_METHODS:
        return isinstance(owner, Cluster)
    if base:
        return _is_package(owner)
    value = variables.get(name)
    module = str(getattr(value, "__module__", ""))
    return getattr(value, "__name__", "") == name and module.startswith("nbgpu.")


def _is_package(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == "nbgpu"


def _value(name: str, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression without evaluating code: a variable, `current()`, or a cluster's
    `run`."""
    if name in ("nbgpu.current()", "current()"):
        value = variables.get(name.partition(".")[0].removesuffix("()"))
        return current_or_none() if value is current or _is_package(value) else None
    first, dot, attribute = name.partition(".")
    value = variables.get(first)
    if not dot:
        return value
    return value.run if isinstance(value, Cluster) and attribute == "run" else None


def _recipe_call(call: OpenCall, name: str) -> _Signature:
    """Return the arguments of a call whose first argument is a recipe. Its settings and those of the call
    are among them once the recipe is given."""
    recipe = call.first_string
    if recipe is None:
        return _Signature(call.callee, {}, {}, num_positional=1, first=tuple(TRAIN_CONFIGS))
    try:
        model: type[TrainConfig] = settings_of(recipe)
    except ConfigError:
        return _Signature(call.callee, {}, {}, num_positional=1)
    values = {"preset": tuple(presets.names(recipe))}
    models = () if name == "controls" else (model, *_RECIPE_CALLS[name])
    settings = {key: owner for model in models for key, owner in _settings(model).items()}
    return _Signature(call.callee, settings, values, num_positional=1, title=f'"{recipe}",')


def _settings(model: type[BaseModel], names: Container[str] | None = None) -> dict[str, type[BaseModel]]:
    """Return the model for the name of each of its settings, or for those among `names`."""
    return {name: model for name in signatures.names_of(model) if names is None or name in names}
