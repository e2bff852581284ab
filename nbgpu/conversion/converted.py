"""Settings that are converted from another tool's JSON and YAML files, and the TOML file made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import json5
import tomli_w
import yaml

from nbgpu.config import TrainConfig, train_config
from nbgpu.config.own_file import read_text
from nbgpu.errors import ConfigError

_WIDTH = 110

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers such as 1e-5. YAML 1.1 reads them as text, unless they have a point and a sign, as in 1.0e-5."""
SUFFIXES = (".json", ".yml", ".yaml")
_REFERENCE = re.compile(r"\$?@(\w+)")
"""A reference to another value of the file, as in MONAI's bundles: '@latent_channels', '$@image_channels'."""


@dataclass(frozen=True)
class _Setting:
    """The value of a setting, and its origin."""

    value: Any
    origin: str
    """The key that the value comes from, or the reason for the value."""


class Converted:
    """The settings of a recipe with the origin of each, and the values that did not become settings.

    Args:
        recipe: the recipe's name.
        keys: the values of the files.
        names: the names of the files as one text, for messages.
    """

    def __init__(self, recipe: str, keys: Keys, names: str) -> None:
        """Begin without settings and notes."""
        self.recipe = recipe
        self.keys = keys
        self.names = names
        self.left_out: list[str] = []
        """A sentence for each value that did not become a setting, with the reason."""
        self.the_same: list[str] = []
        """'key = value' for each value that is no setting of nbgpu, but what nbgpu always does."""
        self.offered: list[str] = []
        """Lines of TOML that are written as comments, because the user has to complete them, as with a
        path."""
        self._settings: dict[str, _Setting] = {}

    def set(self, setting: str, value: Any, origin: str) -> None:
        """Give a setting a value, with its origin: a key of the files, or the reason for the value."""
        self._settings[setting] = _Setting(value, origin)

    def take(
        self, key: str, setting: str, remark: str = "", convert: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Give a setting the value of a key, if the files have it.

        Args:
            key: the key.
            setting: the setting.
            remark: the difference between the setting and the key, for the comment on the setting.
            convert: a function that returns the setting's value for the key's value, and raises ValueError
                with the reason if there is none.

        Returns:
            The setting's value; None if the setting was not given one.
        """
        if key not in self.keys:
            return None
        value = self.keys.take(key)
        try:
            converted = convert(value)
        except ValueError as error:
            self.left_out.append(f"{key} = {in_words(value)}: {error}")
            return None
        changed = "" if converted == value else f" = {in_words(value)}"
        self.set(setting, converted, f"{key}{changed}" + (f"; {remark}" if remark else ""))
        return converted

    def leave(self, key: str, reason: str) -> None:
        """If the files have the key, note that its value does not become a setting, with the reason."""
        if key in self.keys:
            self.left_out.append(f"{key} = {in_words(self.keys.take(key))}: {reason}")

    def leave_all(self, prefix: str, reason: str) -> None:
        """If the files have the table, note that none of its values becomes a setting, with the reason."""
        if values := self.keys.take_all(prefix):
            listed = ", ".join(
                f"{name} = {in_words(value)}" if name else in_words(value) for name, value in values.items()
            )
            self.left_out.append(f"{prefix} ({listed}): {reason}")

    def note_fixed(self, key: str, *values: Any, otherwise: str) -> None:
        """If the files have the key, note that nbgpu behaves the same, if the value is one of `values`; else
        note the value as left out, with `otherwise` as the reason."""
        if key in self.keys:
            value = self.keys.take(key)
            if value in values:
                self.the_same.append(f"{key} = {in_words(value)}")
            else:
                self.left_out.append(f"{key} = {in_words(value)}: {otherwise}")

    @property
    def values(self) -> dict[str, Any]:
        """The values by setting."""
        return {name: setting.value for name, setting in self._settings.items()}

    def config(self) -> TrainConfig:
        """Return the validated settings.

        Raises:
            ConfigError: settings are not valid; the message has the origin of each setting that it names.
        """
        try:
            return train_config(self.recipe, **self.values)
        except ConfigError as error:
            problems = str(error)
            origins = [
                f"{name} is from {setting.origin}"
                for name, setting in self._settings.items()
                if re.search(rf"\b{name}\b", problems)
            ]
            raise ConfigError("\n".join([f"{self.names}:", problems, *origins])) from None

    def notes(self) -> list[str]:
        """Return lines about all values that did not become a setting."""
        lines = []
        if self.left_out:
            lines += ["Not taken over:", *(f"- {one}" for one in self.left_out)]
        if unknown := self.keys.rest():
            lines += ["Not known, and left out:", *(f"- {k} = {in_words(v)}" for k, v in unknown.items())]
        if self.the_same:
            lines += [f"The same here, with nothing to set: {', '.join(self.the_same)}."]
        return lines

    def to_toml(self) -> str:
        """Return the text of a file for --config, with the origin of each setting and the values that are
        left out as comments."""
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
    """Return a line of TOML with a comment at its end, or above it if both are too long for one line."""
    comment = " ".join(comment.split())
    if len(line) + len(comment) + 4 > _WIDTH:
        return f"# {comment}\n{line}\n"
    return f"{line}  # {comment}\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"_": value}).removeprefix("_ = ").rstrip("\n")


def read(path: Path) -> dict[str, Any]:
    """Return the content of a .json, .yml or .yaml file. JSON may have comments and trailing commas.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping with names as keys.
    """
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = read_text(path)
        content = json5.loads(text) if kind == "JSON" else _with_numbers(yaml.safe_load(text))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} cannot be read as {kind}: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f'{path} must have names and values, such as {{"batch_size": 2}}')
    return content


class Keys:
    """The values of files by their keys, such as 'autoencoder_train.lr'. A conversion takes the values that
    it knows, so that the unknown ones remain.

    A value such as '@latent_channels' is a reference to another value, as in MONAI's bundles, and is replaced
    by that value, which is then not taken again.

    Args:
        contents: the contents of the files; a later file's value replaces that of an earlier one.
    """

    def __init__(self, *contents: Mapping[str, Any]) -> None:
        """Flatten the tables to keys with points, and resolve references."""
        whole = {name: value for content in contents for name, value in content.items()}
        self._values: dict[str, Any] = {}
        referred_to: set[str] = set()
        for key, value in _flat(whole):
            reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if reference and reference[1] in whole:
                referred_to.add(reference[1])
                value = whole[reference[1]]
            self._values[key] = value
        for name in referred_to:
            self._values.pop(name, None)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, default: Any = None) -> Any:
        """Remove the value of a key and return it; return the default if there is none."""
        return self._values.pop(key, default)

    def take_all(self, prefix: str) -> dict[str, Any]:
        """Remove the remaining values of a table, and return them by their keys in the table."""
        keys = [key for key in self._values if key == prefix or key.startswith(f"{prefix}.")]
        return {key.removeprefix(prefix).removeprefix("."): self._values.pop(key) for key in keys}

    def rest(self) -> dict[str, Any]:
        """Return the values that were not taken, by key."""
        return dict(self._values)


def _with_numbers(value: Any) -> Any:
    """Return a value in which texts such as '1e-5', also in nested lists and tables, are numbers."""
    if isinstance(value, dict):
        return {name: _with_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (keys joined with points, value) for each value in nested tables. An empty table is a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_words(value: Any) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)
