"""Packages that only some settings need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from nbgpu.errors import ConfigError

if TYPE_CHECKING:
    from nbgpu.config import TrainConfig


def require(config: TrainConfig) -> None:
    """Raise a ConfigError that names every package which the settings need and which is not installed."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb != "off"}
    lacking = [name for name, is_wanted in wanted.items() if is_wanted and find_spec(name) is None]
    if lacking:
        settings = " and ".join(f"{name}={getattr(config, name)!r}" for name in lacking)
        packages = f"the package{'s' if len(lacking) > 1 else ''} {' and '.join(lacking)}"
        raise ConfigError(
            f"{settings}: {packages} {'are' if len(lacking) > 1 else 'is'} not installed here. "
            f"pip install 'nbgpu[{','.join(lacking)}]', or leave it off"
        )
