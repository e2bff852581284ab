"""Reading of JSON and YAML files of other tools, also of JSON with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import json5
import yaml

from nbgpu.config.own_file import read_text
from nbgpu.errors import ConfigError

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""A number that YAML 1.1 takes for text unless it has a point and a sign: 1e-5."""
SUFFIXES = (".json", ".yml", ".yaml")
_REFERENCE = re.compile(r"\$?@(\w+)")
"""How MONAI's bundles refer to another value of the file: '@latent_channels', '$@image_channels'."""


def read(path: Path) -> dict[str, Any]:
    """Return the content of a .json, .yml or .yaml file, which may have comments and trailing commas.

    Raises:
        ConfigError: the file cannot be read, or is no table of names and values.
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
    """The values of files by their keys, such as 'autoencoder_train.lr'. Each is taken once.

    A value such as '@latent_channels' refers to another one, as in MONAI's bundles, which is then taken with
    it.

    Args:
        contents: what the files have; a later file's value replaces that of an earlier one.
    """

    def __init__(self, *contents: Mapping[str, Any]) -> None:
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

    def has_table(self, prefix: str) -> bool:
        """Whether the files have values below a key."""
        return any(key.startswith(f"{prefix}.") for key in self._values)

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is not among the rest any more; the default where it is not
        there."""
        return self._values.pop(key, default)

    def take_all(self, prefix: str) -> dict[str, Any]:
        """Return the values of a table that are still there, by the rest of their keys."""
        keys = [key for key in self._values if key == prefix or key.startswith(f"{prefix}.")]
        return {key.removeprefix(prefix).removeprefix("."): self._values.pop(key) for key in keys}

    def rest(self) -> dict[str, Any]:
        """Return the values that nobody has taken."""
        return dict(self._values)


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_numbers(one) for one in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_words(value: Any) -> str:
    """Return a value as JSON has it."""
    return json.dumps(value, ensure_ascii=False, default=str)
