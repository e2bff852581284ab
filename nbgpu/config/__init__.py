"""All settings, each declared once. The command line, the control panel, TOML files and the table in the docs
are derived from these models: a field that is added here shows up in all of them with no other edit.

A field has its meaning in `description`, its bounds in `ge`/`le`/`Literal`, and its group in the control
panel in `control(...)`. A field with no control is for files and the command line only.
"""

from __future__ import annotations

from nbgpu.config import site as site  # what reads settings also checks the site's file
from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.data import DataSettings
from nbgpu.config.recipe_packages import TRAIN_CONFIGS
from nbgpu.config.recipes import (
    RECIPE_GROUP,
    OwnConfig,
    config_of_point,
    settings_beside,
    settings_of,
    train_config,
    with_preset,
)
from nbgpu.config.training import (
    MAX_PROFILED_STEPS,
    CheckpointSettings,
    LogSettings,
    LoopSettings,
    OptimizerSettings,
    ParallelSettings,
    PrecisionSettings,
    TrainConfig,
)
from nbgpu.config.written import read_tables, read_toml, write_toml

__all__ = [
    "MAX_PROFILED_STEPS",
    "RECIPE_GROUP",
    "TRAIN_CONFIGS",
    "CheckpointSettings",
    "ClusterConfig",
    "DataSettings",
    "LogSettings",
    "LoopSettings",
    "OptimizerSettings",
    "OwnConfig",
    "ParallelSettings",
    "PrecisionSettings",
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
