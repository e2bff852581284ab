"""Reports faults in the person's data before any engine starts."""

from __future__ import annotations

import logging
import os
import subprocess

from nbgpu.config import TrainConfig
from nbgpu.errors import DataError
from nbgpu.machine import interpreter

_log = logging.getLogger("nbgpu.data")

_BAD_DATA = 3
"""The exit code of `nbgpu.recipes.check`."""


def require(config: TrainConfig) -> None:
    """Raise DataError with a line for every bad row and file.

    With files this takes some seconds, because the process that looks at them loads torch, and with
    `check_voxels` also the time to read the files that have not been found good before.
    """
    if config.data in type(config).WITHOUT_FILES:
        return
    command = interpreter.command("nbgpu.recipes.check", str(os.getpid()))
    # The process itself reports the steps that take long.
    done = subprocess.run(command, input=config.model_dump_json(), stderr=subprocess.PIPE, text=True)
    if done.returncode == _BAD_DATA:
        raise DataError(done.stderr.strip())
    if done.returncode != 0:
        # The ranks meet the same fault, unless the process was killed, and report it with their traceback.
        last_words = done.stderr.strip().rpartition("\n")[2] or "it said nothing"
        _log.warning(
            "the data were not checked before the start, because the process that reads them ended with code %d: %s",
            done.returncode,
            last_words,
        )
