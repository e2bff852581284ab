"""docs/coming-from.md names flags that there are."""

from __future__ import annotations

import re

from conftest import REPOSITORY

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig

_OF_COMMANDS = {"config", "find-batch-size", "nproc-per-node", "nnodes", "logdir"}
"""Flags that are no settings."""


def test_every_flag_is_a_setting() -> None:
    known = {*ClusterConfig.model_fields, *(name for c in TRAIN_CONFIGS.values() for name in c.model_fields)}
    text = (REPOSITORY / "docs" / "coming-from.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    named = {flag for row in rows for flag in re.findall(r"--([a-z][a-z0-9-]*)", row[1])} - _OF_COMMANDS
    assert len(named) > 30
    assert not {flag for flag in named if flag.replace("-", "_") not in known}
