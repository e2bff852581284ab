"""Read and write settings as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.own_file import read_text
from nbgpu.config.recipes import train_config
from nbgpu.config.training import TrainConfig
from nbgpu.errors import ConfigError


def write_toml(path: Path, cluster: ClusterConfig, train: TrainConfig) -> None:
    """Write both as the tables [cluster] and [train]. Values that are None are left out, and are read back as
    None."""
    tables = {
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "train": train.model_dump(mode="json", exclude_none=True),
    }
    path.write_text(tomli_w.dumps(tables))


def read_tables(path: Path) -> dict[str, Any]:
    """The content of a TOML file; ConfigError where it cannot be read."""
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        missing = f"file {path}" if path.parent.is_dir() else f"folder {path.parent}"
        raise ConfigError(f"there is no {missing}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read as TOML: too many brackets stand in one another") from None


def read_toml(path: Path, **overrides: Any) -> tuple[ClusterConfig, TrainConfig]:
    """Read a file that `write_toml` or a person has written; a ConfigError names the file and every bad
    value."""
    tables = read_tables(path)
    unknown = sorted(set(tables) - {"cluster", "train"})
    if unknown:
        raise ConfigError(
            f"{path} has the unknown table(s) {', '.join(unknown)}. It may have [cluster] and [train]"
        )
    if plain := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise ConfigError(f"{path}: {' and '.join(plain)} must be a table, such as [{plain[0]}]")
    train: Mapping[str, Any] = {"recipe": "autoencoder"} | tables.get("train", {}) | overrides
    if not isinstance(train["recipe"], str):
        raise ConfigError(f"{path}: recipe = {train['recipe']!r} is not a recipe's name")
    try:
        return ClusterConfig.checked(**tables.get("cluster", {})), train_config(**train)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None
