"""All settings, each declared once. The command line, the control panel, TOML files and the tables of the
docs are derived from these models, so that a new field appears in all of them.

A field has its meaning in the text below it or in `description`, its bounds in `ge`/`le`/`Literal`, and its
group in the control panel in `control(...)`. A field without control is only for files and the command line.
"""

from __future__ import annotations

from nbgpu.config import site as site  # sets the check of the site's file
from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.data import DataSettings
from nbgpu.config.recipe_packages import TRAIN_CONFIGS
from nbgpu.config.recipes import (
    OwnConfig,
    config_of_point,
    settings_beside,
    settings_of,
    train_config,
    with_preset,
)
from nbgpu.config.training import CheckpointSettings, TrainConfig
from nbgpu.config.written import read_tables, read_toml, write_toml

__all__ = [
    "TRAIN_CONFIGS",
    "CheckpointSettings",
    "ClusterConfig",
    "DataSettings",
    "OwnConfig",
    "TrainConfig",
    "config_of_point",
    "read_tables",
    "read_toml",
    "settings_beside",
    "settings_of",
    "train_config",
    "with_preset",
    "write_toml",
]
