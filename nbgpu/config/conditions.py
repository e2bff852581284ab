"""Conditional settings: which settings count, and which defaults they have, depending on another setting. The
momentum of SGD counts only with SGD, and a learning rate for generated data is no default for a person's own.

A class of settings declares in `ONLY_WITH` which of its settings count on a condition. A setting that has
been changed and does not count is refused, with the condition in words; the same words stand beside its
meaning in the docs, in `--help` and in the controls. So nobody changes a number and waits for an effect that
it cannot have.

The class declares conditional defaults in `DEFAULTS_WITH`, and in `REPLACES` which setting takes the place of
which. A value that was given always wins over a default, also where it equals another default of the setting.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nbgpu.config import site_file


@dataclass(frozen=True)
class Condition:
    """A condition on the value of a setting, under which other settings have an effect.

    Args:
        name: the setting that decides.
        holds: returns whether a value of that setting fulfils the condition.
        words: the condition as text that follows 'only with', such as "optimizer='sgd'".
    """

    name: str
    holds: Callable[[Any], bool]
    words: str


def one_of(name: str, *values: Any) -> Condition:
    """Return the condition that a setting has one of these values."""
    return Condition(name, lambda value: value in values, f"{name}={' or '.join(map(repr, values))}")


def none_of(name: str, *values: Any) -> Condition:
    """Return the condition that a setting has none of these values."""
    return Condition(
        name, lambda value: value not in values, f"{name} other than {' or '.join(map(repr, values))}"
    )


def given(name: str) -> Condition:
    """Return the condition that a setting is switched on: neither 0 nor False, nor left out."""
    return Condition(name, bool, name)


def left_out(name: str) -> Condition:
    """Return the condition that a setting is switched off: 0, False, or left out."""
    return Condition(name, lambda value: not value, f"no {name}")


def widest(name: str, width: int) -> Condition:
    """Return the condition that the largest of a setting's numbers is at least `width`."""
    return Condition(name, lambda values: max(values, default=0) >= width, f"{width} or more among {name}")


def names_one_of(name: str, *parts: str) -> Condition:
    """Return the condition that one of a setting's values contains one of these names."""
    return Condition(
        name,
        lambda values: any(part in value for value in values for part in parts),
        f"{' or '.join(parts)} among {name}",
    )


@dataclass(frozen=True)
class Rule:
    """Some settings that count only where the condition holds."""

    condition: Condition
    names: tuple[str, ...]


Rules = tuple[Rule, ...]


def only(condition: Condition, *names: str) -> Rule:
    """Return the rule that the settings of these names count only where the condition holds."""
    return Rule(condition, names)


@dataclass(frozen=True)
class OtherDefaults:
    """The defaults of some settings where the condition holds."""

    condition: Condition
    values: Mapping[str, Any]


DefaultRules = tuple[OtherDefaults, ...]


def defaults(condition: Condition, **values: Any) -> OtherDefaults:
    """Return the rule that the settings of these names have these defaults where the condition holds."""
    return OtherDefaults(condition, values)


def conditions(model: type[BaseModel], name: str) -> tuple[Condition, ...]:
    """Return all conditions for a setting to have an effect, of the model and of its base classes."""
    return tuple(rule.condition for rule in _declared(model, "ONLY_WITH") if name in rule.names)


def _declared(model: type[BaseModel], attribute: str) -> list[Any]:
    """Return the rules that a model and its base classes declare in an attribute, the model's own last."""
    return [rule for base in model.__mro__[::-1] for rule in vars(base).get(attribute, ())]


def meaning(model: type[BaseModel], name: str) -> str:
    """Return the description of a setting, with its conditional defaults and the conditions under which it
    has an effect."""
    parts = [
        f"{_format_default(rule.values[name])} by default with {rule.condition.words}"
        for rule in _declared(model, "DEFAULTS_WITH")
        if name in rule.values
    ]
    parts += [f"only with {condition.words}" for condition in conditions(model, name)]
    return "; ".join([description(model, name), *parts])


def description(model: type[BaseModel], name: str) -> str:
    """Return the meaning of a setting: the text below its field in the class, or the field's own
    `description`."""
    if text := model.model_fields[name].description:
        return text
    for base in model.__mro__:
        if text := _texts_below_fields(base.__module__).get((base.__name__, name)):
            return text
    return ""


@cache
def _texts_below_fields(module: str) -> dict[tuple[str, str], str]:
    """Return the texts below the fields of a module's classes, by (class, field). They are parsed on demand,
    because pydantic's `use_attribute_docstrings` would delay every import."""
    file = getattr(sys.modules.get(module), "__file__", None)
    tree = ast.parse(Path(file).read_bytes() if file else "")
    return {
        (cls.name, field.target.id): " ".join(below.value.value.split())
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for field, below in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def without_effect(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, Condition]]:
    """Yield (name, unfulfilled condition) for the settings that differ from their present defaults and have
    no effect beside the others.

    Args:
        model: the class of the settings.
        values: the value of every setting.
    """
    present = defaults_beside(model, values)
    for name in model.model_fields:
        if values[name] != present[name]:
            for condition in conditions(model, name):
                if not condition.holds(values[condition.name]):
                    yield name, condition


def defaults_beside(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of every setting, given these values of other settings. If `values` lacks a setting
    that decides about defaults, that setting's default decides."""
    present = field_defaults(model)
    for rule in _declared(model, "DEFAULTS_WITH"):
        if _holds(rule.condition, values.get(rule.condition.name, present[rule.condition.name])):
            present |= rule.values
    return present | site_defaults(model, values)


def field_defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the unconditional default of every setting."""
    return {name: field.default for name, field in model.model_fields.items()}


def default_of(model: type[BaseModel], name: str) -> Any:
    """Return the default of a setting if no setting is given: the site's default, or the field's."""
    return site_defaults(model, {}).get(name, model.model_fields[name].default)


def site_defaults(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that the host's administrator has set and that have an effect with these values.

    Raises:
        ConfigError: the administrator's file has bad rows.
    """
    site = site_file.defaults_of(model)
    if not site:
        return {}
    merged = {**field_defaults(model), **site, **values}
    rules = [*_declared(model, "ONLY_WITH"), *_declared(model, "SITE_ONLY_WITH")]
    return {
        name: value
        for name, value in site.items()
        if all(_holds(rule.condition, merged[rule.condition.name]) for rule in rules if name in rule.names)
    }


def deciding(model: type[BaseModel]) -> set[str]:
    """Return the settings that decide about the defaults of others."""
    return {rule.condition.name for rule in _declared(model, "DEFAULTS_WITH")}


def in_place_of_defaults(
    model: type[BaseModel], given: Mapping[str, Any], preset: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the values that replace the fields' defaults for settings that are not given.

    They come from `DEFAULTS_WITH`, from the site's file and, with priority, from a preset. Two kinds of
    values are left out: those that would take the effect from a given setting, such as a number of epochs
    beside a given number of steps, and those that have no effect themselves.

    Args:
        model: the class of the settings.
        given: the values that were given, by name.
        preset: the values of a preset, by name.
    """
    preset = preset or {}
    plain_defaults = field_defaults(model)
    values = {
        name: value
        for name, value in {**defaults_beside(model, {**preset, **given}), **preset}.items()
        if name in preset or value != plain_defaults.get(name)
    }
    # A site's default stays even if a given setting then has no effect, so that the conflict is refused: a
    # person would not expect the site's launcher to be dropped silently, and ranks on another host.
    from_site = {} if preset else site_defaults(model, given)
    values = {
        name: value
        for name, value in values.items()
        if name not in given and (name in from_site or not _disables_given(model, name, value, given))
    }
    merged = {**plain_defaults, **values, **given}
    return {
        name: value
        for name, value in values.items()
        if all(_holds(condition, merged[condition.name]) for condition in conditions(model, name))
    }


def _disables_given(model: type[BaseModel], name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a value of one setting takes the effect from a given setting."""
    if any(vars(base).get("REPLACES", {}).get(name) in given for base in model.__mro__):
        return True
    return any(
        condition.name == name and not _holds(condition, value)
        for given_name in given
        for condition in conditions(model, given_name)
    )


def _holds(condition: Condition, value: Any) -> bool:
    """Return whether a condition holds for a value that may not have been checked yet."""
    try:
        return condition.holds(value)
    except TypeError:
        # The check of the value's own setting refuses a wrong type.
        return True


def _format_default(value: Any) -> str:
    return "left out" if value in (None, ()) else repr(value)
