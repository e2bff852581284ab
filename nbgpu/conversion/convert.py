"""Conversion of another tool's configuration files into a recipe's settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbgpu.conversion import fast_ddpm, latent_diffusion
from nbgpu.conversion.converted import SUFFIXES, Converted, Keys, read
from nbgpu.errors import ConfigError

_TOOLS = (latent_diffusion, fast_ddpm)
"""The module for each tool, with the TABLES of the tool's files and the function `convert`."""


def is_foreign(path: Path) -> bool:
    """Return whether a file for --config is another tool's, by its suffix."""
    return path.suffix in SUFFIXES


def write(converted: Converted, path: Path) -> None:
    """Write the settings as a TOML file.

    Raises:
        ConfigError: the path exists already, or the file cannot be written.
    """
    # The text has the names of the converted files, which may contain bytes that are not UTF-8.
    content = converted.to_toml().encode("utf-8", errors="backslashreplace")
    try:
        with path.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                path.unlink()  # a part of the file would make the next call fail
                raise
    except FileExistsError:
        raise ConfigError(f"{path} is there already. Name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file") from None


def convert(paths: Sequence[Path], data: str = "", network: str = "") -> Converted:
    """Return the settings that configuration files of another tool describe.

    Args:
        paths: the configuration, and further files with values that belong to it, such as environment.json.
        data: the data to train on, in place of those in the files; empty for those.
        network: a local file for the autoencoder's perceptual_network; empty for none.

    Raises:
        ConfigError: a file cannot be read, the files are those of no known tool, or their values are not
            valid settings; the message has all problems.
    """
    problems: list[str] = []
    contents: list[dict[str, Any]] = []
    for path in paths:
        try:
            contents.append(read(path))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    names = " and ".join(map(str, paths))
    tables = {name for content in contents for name in content}
    for tool in _TOOLS:
        if tables & {*tool.TABLES}:
            result: Converted = tool.convert(Keys(*contents), names, data, network)
            result.config()  # raises ConfigError for settings that are not valid
            return result
    raise ConfigError(
        f"{names}: not the files of a tool that can be converted. Known are MONAI's tutorial 3d_ldm (with "
        f"{' or '.join(latent_diffusion.TABLES)}) and Fast-DDPM (with {', '.join(fast_ddpm.TABLES)}). The names there are: "
        f"{', '.join(sorted(tables)) or 'none'}"
    )
