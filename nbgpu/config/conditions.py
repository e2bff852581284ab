"""Which settings count only beside certain values of another one: the momentum of SGD only with SGD.

A class of settings declares them in `ONLY_WITH`. A setting that has been changed and does not count is
refused, with the condition in words; the same words stand beside its meaning in the docs, in `--help` and in
the controls. So nobody changes a number and waits for an effect that it cannot have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Condition:
    """What must hold of a setting for another one to count.

    Args:
        name: the setting that decides.
        holds: whether the other one counts, by the value of this one.
        words: the condition as it stands after 'only with'.
    """

    name: str
    holds: Callable[[Any], bool]
    words: str


def one_of(name: str, *values: Any) -> Condition:
    """The setting has one of these values."""
    return Condition(name, lambda value: value in values, f"{name}={' or '.join(map(repr, values))}")


def none_of(name: str, *values: Any) -> Condition:
    """The setting has none of these values."""
    return Condition(
        name, lambda value: value not in values, f"{name} other than {' or '.join(map(repr, values))}"
    )


def given(name: str) -> Condition:
    """The setting is switched on: neither 0 nor False, nor left out."""
    return Condition(name, bool, name)


def left_out(name: str) -> Condition:
    """The setting is switched off: 0, False, or left out."""
    return Condition(name, lambda value: not value, f"no {name}")


def names_one_of(name: str, *parts: str) -> Condition:
    """One of the setting's values contains one of these names."""
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
    """The settings of these names count only where the condition holds."""
    return Rule(condition, names)


def conditions(model: type[BaseModel], name: str) -> tuple[Condition, ...]:
    """All conditions for a setting to count, of the model and of those that it extends."""
    rules = [rule for known in model.__mro__[::-1] for rule in vars(known).get("ONLY_WITH", ())]
    return tuple(rule.condition for rule in rules if name in rule.names)


def meaning(model: type[BaseModel], name: str) -> str:
    """The description of a setting, with the conditions for it to count."""
    parts = [f"only with {condition.words}" for condition in conditions(model, name)]
    return "; ".join([str(model.model_fields[name].description), *parts])


def without_effect(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, Condition]]:
    """Yield the settings that differ from their defaults and do not count beside the others, each with every
    condition that does not hold.

    Args:
        model: the class of the settings.
        values: the value of every setting.
    """
    for name, field in model.model_fields.items():
        if values[name] != field.default:
            for condition in conditions(model, name):
                if not condition.holds(values[condition.name]):
                    yield name, condition
