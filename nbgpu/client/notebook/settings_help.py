"""Tab and Shift-Tab in calls that take settings by name: which there are, their types, values and help.

A call counts where the name in the notebook is nbgpu's own: `cluster.train("autoencoder", ba` is completed if
`cluster` is a Cluster. The call that the cursor is in is read from text that is still being typed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
_TEXT = re.compile(r"\s*[rR]?(\"|')(.*?)\1\s*", re.DOTALL)
_PAIRS = {")": "(", "]": "[", "}": "{"}


_RUNS_A_RECIPE: Mapping[str, tuple[type[BaseModel], ...]] = {
    "train": (),
    "plan": (),
    "find_batch_size": (),
    "sweep": (SweepConfig, ClusterConfig),
    "scaling": (StudyConfig, ClusterConfig),
    "study": (StudyConfig, ClusterConfig),
    "controls": (),
}
"""The calls whose first argument is a recipe, by name, and the settings that they take beside its own."""
_OF_A_CLUSTER = ("train", "plan", "find_batch_size")
_BEFORE_ALL = 1000
"""A priority above those of IPython's own matchers, which are not asked once this one has found a setting."""


@dataclass
class _Bracket:
    """An open bracket, with the positions of the commas within it."""

    kind: str
    begin: int
    commas: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class OpenCall:
    """A call whose closing bracket is behind the cursor, or not typed yet."""

    callee: str
    """The text of the called expression, such as 'cluster.train' or 'nbgpu.current().train'."""
    arguments: tuple[str, ...]
    """The text of the arguments before the one that the cursor is in."""
    typed: str
    """The text of that argument up to the cursor."""
    in_text: bool
    """Whether the cursor is in a string."""

    @property
    def first_text(self) -> str | None:
        """The first argument, if it is a string and the cursor is behind it."""
        found = _TEXT.fullmatch(self.arguments[0]) if self.arguments else None
        return found[2] if found else None

    @property
    def keywords(self) -> set[str]:
        """The names of the arguments that are given by name."""
        return {found[1] for each in self.arguments if (found := _KEYWORD.match(each))}

    @property
    def keyword(self) -> str:
        """The name of the argument that the cursor is in; empty where it has none yet."""
        found = _KEYWORD.match(self.typed)
        return found[1] if found else ""

    @property
    def begun_text(self) -> str:
        """The string that the cursor is in, up to the cursor."""
        return re.split(r"[\"']", self.typed)[-1] if self.in_text else ""


def open_call(text: str) -> OpenCall | None:
    """Return the innermost call that is open at the end of a text; None where there is none."""
    stack: list[_Bracket] = []
    place = 0
    text_begins = -1
    while place < len(text):
        char = text[place]
        if char in "\"'":
            quote = text[place : place + 3] if text[place : place + 3] in ('"""', "'''") else char
            end = _end_of_text(text, place + len(quote), quote)
            if end is None:
                text_begins = place
                break
            place = end
            continue
        if char == "#":
            line_end = text.find("\n", place)
            if line_end < 0:
                return None  # the cursor is in a comment
            place = line_end
            continue
        if char in "([{":
            stack.append(_Bracket(char, place))
        elif char in ")]}":
            if not stack or stack.pop().kind != _PAIRS[char]:
                stack.clear()
        elif char == "," and stack:
            stack[-1].commas.append(place)
        place += 1
    if not stack or stack[-1].kind != "(" or (found := _CALLEE.search(text[: stack[-1].begin])) is None:
        return None
    cuts = [stack[-1].begin, *stack[-1].commas]
    arguments = tuple(text[begin + 1 : end] for begin, end in pairwise(cuts))
    return OpenCall(found[1], arguments, text[cuts[-1] + 1 :], text_begins >= 0)


def _end_of_text(text: str, place: int, quote: str) -> int | None:
    """The place behind a string; None where it does not end, as when it is still being typed."""
    while place < len(text):
        if text[place] == "\\":
            place += 2
        elif text.startswith(quote, place):
            return place + len(quote)
        elif text[place] == "\n" and len(quote) == 1:
            return place  # a string that was never closed ends with its line
        else:
            place += 1
    return None


@dataclass(frozen=True)
class _Setting:
    """One setting: its class of settings, and its name."""

    model: type[BaseModel]
    name: str

    @property
    def values(self) -> tuple[str, ...]:
        return signatures.choices_of(self.model.model_fields[self.name])


@dataclass(frozen=True)
class _Known:
    """The arguments that a call takes: settings by name, and texts for some of the others."""

    callee: str
    settings: Mapping[str, _Setting]
    values: Mapping[str, tuple[str, ...]]
    """Texts that arguments without a setting of their own take."""
    begins: int = 0
    """The number of arguments before the ones that are given by name."""
    first: tuple[str, ...] = ()
    """The texts that the first argument may be."""
    title: str = ""


def has_matchers() -> bool:
    """Whether IPython gives its matchers the whole cell, as it does from 8.6 on."""
    return hasattr(completer, "CompletionContext")


def install(shell: Any) -> None:
    """Let this shell's Tab complete the settings. Harmless when repeated, and without effect where IPython
    gives its matchers one line only."""
    if has_matchers() and _complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(_complete)


def uninstall(shell: Any) -> None:
    """Undo `install`."""
    if _complete in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(_complete)


def _complete(context: Any) -> Any:
    """Complete the settings of the call that the cursor is in. This is a matcher of IPython's second
    interface; once it finds something, IPython's own matchers are left out."""
    lines = context.full_text.split("\n")
    text = "\n".join([*lines[: context.cursor_line], context.text_until_cursor])
    shell = get_ipython()
    fragment, found = completed(text, {} if shell is None else shell.user_ns)
    return completer.SimpleMatcherResult(
        completions=[completer.SimpleCompletion(text=each, type="param") for each in found],
        matched_fragment=fragment,
        suppress=bool(found),
    )


if has_matchers():
    _complete = completer.completion_matcher(
        api_version=2, identifier="nbgpu.settings", priority=_BEFORE_ALL
    )(_complete)


def completed(text: str, variables: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the begun word in a call of nbgpu, and the texts that can complete it; an empty list if the call
    is not known.

    Args:
        text: the cell up to the cursor.
        variables: the notebook's.
    """
    call = open_call(text)
    known = _given_settings(call, variables) if call is not None else None
    if call is None or known is None:
        return "", []
    begun = call.begun_text
    if call.in_text:
        if call.keyword:
            setting = known.settings.get(call.keyword)
            values = setting.values if setting else known.values.get(call.keyword, ())
        else:
            values = known.first if not call.arguments else ()
        return begun, [each for each in values if each.startswith(begun)]
    name = call.typed.lstrip()
    if not call.arguments and not name and known.first:
        return "", [f'"{each}"' for each in known.first]
    if len(call.arguments) < known.begins or not re.fullmatch(r"\w*", name):
        return "", []
    names = [*known.values, *known.settings]
    return name, [f"{each}=" for each in names if each.startswith(name) and each not in call.keywords]


def help_at(text: str, rest: str, variables: Mapping[str, Any]) -> str:
    """Return the help for the call that the cursor is in: for the setting at the cursor, or for all of them;
    empty where it is no call of nbgpu's.

    Args:
        text: the cell up to the cursor.
        rest: the text behind the cursor.
        variables: the notebook's.
    """
    call = open_call(text)
    known = _given_settings(call, variables) if call is not None else None
    if call is None or known is None or len(call.arguments) < known.begins:
        return ""
    behind = re.match(r"\w*", rest)
    name = call.keyword or call.typed.strip() + (behind[0] if behind else "")
    if name in known.settings:
        setting = known.settings[name]
        return signatures.listed(setting.model, [name])
    lines = [signatures.listed(setting.model, [name]) for name, setting in known.settings.items()]
    return "\n".join([f"{known.callee}({known.title}", *lines, ")"])


def _given_settings(call: OpenCall, variables: Mapping[str, Any]) -> _Known | None:
    """Return the settings that a call takes by name, from the objects that its text names: a method of a
    cluster or a run, or a function of nbgpu. None for any other call."""
    base, _, name = call.callee.rpartition(".")
    owner = _value(base, variables)
    if name in _RUNS_A_RECIPE and _is_door(name, base, owner, variables):
        return _recipe_call(call, name)
    if name == "set" and isinstance(owner, Run):
        return _Known(call.callee, _settings(type(owner.config), steerable(type(owner.config))), {})
    if name == "predict" and isinstance(owner, Cluster):
        run = _value(call.arguments[0].strip(), variables) if call.arguments else None
        allowed = run.config.AT_PREDICTION if isinstance(run, Run) else ()
        from_run = _settings(type(run.config), allowed) if isinstance(run, Run) else {}
        return _Known(call.callee, {**_settings(PredictConfig), **from_run}, {}, begins=1)
    if name == "Cluster" and _is_door(name, base, owner, variables):
        return _Known(call.callee, _settings(ClusterConfig), {})
    return None


def _is_door(name: str, base: str, owner: Any, variables: Mapping[str, Any]) -> bool:
    """Whether a call is one of nbgpu's own: a method of a Cluster, or a function of the package that is
    called through the package or by its imported name."""
    if name in _OF_A_CLUSTER:
        return isinstance(owner, Cluster)
    if base:
        return _is_package(owner)
    own = variables.get(name)
    return getattr(own, "__name__", "") == name and str(getattr(own, "__module__", "")).startswith("nbgpu.")


def _is_package(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == "nbgpu"


def _value(name: str, variables: Mapping[str, Any]) -> Any:
    """Return the value of a name. No call is made to find it except `current()`, which gives the cluster."""
    if name in ("nbgpu.current()", "current()"):
        own = variables.get(name.partition(".")[0].removesuffix("()"))
        return current_or_none() if own is current or _is_package(own) else None
    first, dot, attribute = name.partition(".")
    value = variables.get(first)
    if not dot:
        return value
    return value.run if isinstance(value, Cluster) and attribute == "run" else None


def _recipe_call(call: OpenCall, name: str) -> _Known:
    """Return what may be given in a call whose first argument is a recipe: first the names of recipes; once
    one is named, its settings and those of the call itself."""
    beside = {n: s for model in _RUNS_A_RECIPE[name] for n, s in _settings(model).items()}
    recipes = tuple(TRAIN_CONFIGS)
    recipe = call.first_text
    if recipe is None:
        return _Known(call.callee, {}, {}, begins=1, first=recipes)
    try:
        model: type[TrainConfig] = settings_of(recipe)
    except ConfigError:
        return _Known(call.callee, {}, {}, begins=1)
    values = {"preset": tuple(presets.names(recipe))}
    settings = {} if name == "controls" else {**_settings(model), **beside}
    return _Known(call.callee, settings, values, begins=1, title=f'"{recipe}",')


def _settings(model: type[BaseModel], names: Any = None) -> dict[str, _Setting]:
    return {
        name: _Setting(model, name) for name in signatures.names_of(model) if names is None or name in names
    }
