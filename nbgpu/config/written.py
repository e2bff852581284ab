"""Settings as a person would write them: a call in a notebook, and a command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.recipes import settings_beside, settings_of, train_config

_WIDTH = 79
"""The longest call on a line of its own."""


def differing(recipe: str, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings that are needed for the same run: those that differ from their defaults beside the
    others.

    Args:
        recipe, preset: the recipe, and the name of values that take the place of defaults; '' for none.
        given: the settings that were given, by name.

    Raises:
        ConfigError: the settings are not valid together.
    """
    beside = {"preset": preset} if preset else {}
    whole = train_config(recipe, **beside, **given)
    needed = dict(given)
    for name, value in given.items():
        others = {setting: needed[setting] for setting in needed if setting != name}
        if settings_beside(recipe, {**beside, **others})[name] == value:
            needed = others
    # A value that is given also changes what a preset or another default may be.
    is_same = train_config(recipe, **beside, **needed).model_dump() == whole.model_dump()
    return needed if is_same else dict(given)


def as_code(
    recipe: str, preset: str, settings: Mapping[str, Any], cluster: ClusterConfig, is_started: bool = False
) -> str:
    """A cell that trains with these settings.

    Args:
        settings: those that differ from their defaults, see `differing`.
        is_started: whether the notebook has the cluster already, so that a start would be refused.
    """
    given = {"preset": preset, **settings} if preset else settings
    arguments = [_literal(recipe), *(f"{name}={_literal(value)}" for name, value in given.items())]
    call = f"run = cluster.train({', '.join(arguments)})"
    if len(call) > _WIDTH:
        call = "\n".join(["run = cluster.train(", *(f"    {argument}," for argument in arguments), ")"])
    start = " ".join(
        ["%nbgpu start", *map(shlex.quote, arguments_of(ClusterConfig, cluster.beyond_defaults))]
    )
    begin = [f"# {start}"] if is_started else ["%load_ext nbgpu", start]
    return "\n".join(
        [
            "import nbgpu",
            "",
            *begin,
            "cluster = nbgpu.current()",
            call,
        ]
    )


def as_command(recipe: str, preset: str, settings: Mapping[str, Any], cluster: ClusterConfig) -> str:
    """The command that trains with these settings, for a shell."""
    arguments = ["nbgpu", "train", recipe, *(["--preset", preset] if preset else [])]
    arguments += arguments_of(settings_of(recipe), settings)
    arguments += arguments_of(ClusterConfig, cluster.beyond_defaults)
    return shlex.join(arguments)


def arguments_of(model: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """The flags of these settings, as `nbgpu.config.flags.parse` reads them."""
    arguments = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool) and model.model_fields[name].annotation is bool:
            arguments.append(flag if value else f"--no-{flag[2:]}")
            continue
        items = [str(item) for item in (value if isinstance(value, tuple) else (value,))]
        if len(items) == 1 and items[0].startswith("-"):
            # Alone it would be taken for a flag.
            arguments.append(f"{flag}={items[0]}")
        else:
            arguments += [flag, *items]
    return arguments


def _literal(value: Any) -> str:
    """A value as code, with the quotation marks that the docs have."""
    if isinstance(value, str) and not set(value) & {'"', "\\"} and value.isprintable():
        return f'"{value}"'
    return repr(value)
