"""Conversion of another tool's configuration files into a recipe's settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbgpu.conversion import fast_ddpm, latent_diffusion
from nbgpu.conversion.converted import SUFFIXES, Converted, Keys, read
from nbgpu.errors import ConfigError

_KNOWN = (
    (latent_diffusion.TABLES, latent_diffusion.convert),
    (fast_ddpm.TABLES, fast_ddpm.convert),
)
"""The tables of each tool's files, and the function that converts them."""


def is_foreign(path: Path) -> bool:
    """Return whether a file for --config is another tool's, by its ending."""
    return path.suffix in SUFFIXES


def write(converted: Converted, path: Path) -> None:
    """Write the settings as a TOML file; ConfigError where there is a file already or none can be written."""
    # A file's name, which the text repeats, may hold bytes that are no UTF-8.
    content = converted.to_toml().encode("utf-8", errors="backslashreplace")
    try:
        with path.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                path.unlink()  # half of it would keep the next try from writing
                raise
    except FileExistsError:
        raise ConfigError(f"{path} is there already. Name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file") from None


def convert(paths: Sequence[Path], data: str = "", network: str = "") -> Converted:
    """Return the settings that configuration files of another tool describe.

    Args:
        paths: the configuration, and further files whose values belong to it, such as environment.json.
        data: the data to train on, in place of what the files say.
        network: a local file for the autoencoder's perceptual_network.

    Raises:
        ConfigError: a file cannot be read, they are of no tool that is known, or their values are no valid
            settings; the message has all that is wrong.
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
    for of_tool, convert_files in _KNOWN:
        if tables & {*of_tool}:
            result = convert_files(Keys(*contents), names, data, network)
            result.config()
            return result
    raise ConfigError(
        f"{names}: not the files of a tool that can be converted. Known are MONAI's tutorial 3d_ldm (with "
        f"{' or '.join(latent_diffusion.TABLES)}) and Fast-DDPM (with {', '.join(fast_ddpm.TABLES)}). The names there are: "
        f"{', '.join(sorted(tables)) or 'none'}"
    )
