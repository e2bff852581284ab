"""Which launcher a cluster's settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from nbgpu.client.launchers.launcher import Launcher
from nbgpu.config import ClusterConfig


def launcher_of(config: ClusterConfig) -> Launcher:
    """Return the launcher of these settings, which has started nothing yet.

    Args:
        config: the settings of the cluster.

    Raises:
        ConfigError: a setting of the launcher is wrong.
    """
    return _implementation(config).create(config)


def launcher_that_started(config: ClusterConfig, job: str, record: Mapping[str, Any]) -> Launcher:
    """Return the launcher that stands for the one which has started the hosts of a kept cluster.

    Args:
        config: the settings of the cluster.
        job: the launcher's `job`.
        record: what its `record` returned.
    """
    launcher = _implementation(config).adopt(config, record)
    launcher.take_over(job, record)
    return launcher


def _implementation(config: ClusterConfig) -> type[Launcher]:
    implementation: type[Launcher] = resolve_name(config.launcher_settings.IMPLEMENTATION)
    return implementation
