"""Settings that come from another tool's files, and the TOML file that is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tomli_w

from nbgpu.config import TrainConfig, train_config
from nbgpu.conversion.foreign import Keys, in_words
from nbgpu.errors import ConfigError

_WIDTH = 110


@dataclass(frozen=True)
class _Setting:
    value: Any
    origin: str
    """The key that it comes from, or why it has this value."""


class Converted:
    """The settings of a recipe, with where each is from, and what could not be taken over.

    Args:
        recipe: the recipe's name.
        keys: the values of the files.
        names: the files, for messages.
    """

    def __init__(self, recipe: str, keys: Keys, names: str) -> None:
        self.recipe = recipe
        self.keys = keys
        self.names = names
        self.left_out: list[str] = []
        """A sentence for each value that did not become a setting, with the reason."""
        self.the_same: list[str] = []
        """The values that cannot be set, and are what nbgpu does."""
        self.offered: list[str] = []
        """Lines of TOML that only wait for something of the user's."""
        self._settings: dict[str, _Setting] = {}

    def set(self, setting: str, value: Any, why: str) -> None:
        """Give a setting a value that no key of the files has."""
        self._settings[setting] = _Setting(value, why)

    def take(
        self, key: str, setting: str, remark: str = "", convert: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Give a setting the value of a key, if the files have it.

        Args:
            key: the key.
            setting: the setting.
            remark: what differs.
            convert: makes the setting's value of the key's; ValueError where there is none, with the reason.

        Returns:
            The setting's value; None where it has not got one.
        """
        if key not in self.keys:
            return None
        value = self.keys.take(key)
        try:
            found = convert(value)
        except ValueError as error:
            self.left_out.append(f"{key} = {in_words(value)}: {error}")
            return None
        changed = "" if found == value else f" = {in_words(value)}"
        self.set(setting, found, f"{key}{changed}" + (f"; {remark}" if remark else ""))
        return found

    def leave(self, key: str, reason: str) -> None:
        """Say that a key's value is not taken over, if the files have it."""
        if key in self.keys:
            self.left_out.append(f"{key} = {in_words(self.keys.take(key))}: {reason}")

    def leave_all(self, prefix: str, reason: str) -> None:
        """Say that no value of a table is taken over, if the files have it."""
        if values := self.keys.take_all(prefix):
            listed = ", ".join(
                f"{name} = {in_words(value)}" if name else in_words(value) for name, value in values.items()
            )
            self.left_out.append(f"{prefix} ({listed}): {reason}")

    def expect(self, key: str, *values: Any, otherwise: str) -> None:
        """Take a key for what nbgpu does anyway if it has one of these values, and leave it otherwise."""
        if key in self.keys:
            value = self.keys.take(key)
            if value in values:
                self.the_same.append(f"{key} = {in_words(value)}")
            else:
                self.left_out.append(f"{key} = {in_words(value)}: {otherwise}")

    @property
    def values(self) -> dict[str, Any]:
        """The settings' values."""
        return {name: setting.value for name, setting in self._settings.items()}

    def config(self) -> TrainConfig:
        """Return the checked settings. A ConfigError names the keys of the files, too."""
        try:
            return train_config(self.recipe, **self.values)
        except ConfigError as error:
            told = str(error)
            from_keys = [
                f"{name} is from {setting.origin}"
                for name, setting in self._settings.items()
                if re.search(rf"\b{name}\b", told)
            ]
            raise ConfigError("\n".join([f"{self.names}:", told, *from_keys])) from None

    def notes(self) -> list[str]:
        """Return what did not become a setting, in lines."""
        lines = []
        if self.left_out:
            lines += ["Not taken over:", *(f"- {one}" for one in self.left_out)]
        if unknown := self.keys.rest():
            lines += ["Not known, and left out:", *(f"- {k} = {in_words(v)}" for k, v in unknown.items())]
        if self.the_same:
            lines += [f"The same here, with nothing to set: {', '.join(self.the_same)}."]
        return lines

    def to_toml(self) -> str:
        """Return the text of a file for --config, with where each setting is from and what is left out."""
        lines = [
            f"Written by nbgpu convert from {self.names}. Train with it:",
            f"    nbgpu train {self.recipe} --config THIS_FILE",
        ]
        for note in self.notes():
            lines += ["", note] if not note.startswith("- ") else [note]
        text = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        text += f'\n[train]\nrecipe = "{self.recipe}"\n'
        for name, setting in self._settings.items():
            text += _with_comment(f"{name} = {_toml(setting.value)}", setting.origin)
        if self.offered:
            text += "\n" + "".join(f"# {line}".rstrip() + "\n" for line in self.offered)
        return text


def _with_comment(line: str, comment: str) -> str:
    comment = " ".join(comment.split())
    if len(line) + len(comment) + 4 > _WIDTH:
        return f"# {comment}\n{line}\n"
    return f"{line}  # {comment}\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"_": value}).removeprefix("_ = ").rstrip("\n")
