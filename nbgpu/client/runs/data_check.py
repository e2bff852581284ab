"""Reports faults in the person's data before any engine starts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from nbgpu.config import TrainConfig
from nbgpu.config.settings import paths_to_read
from nbgpu.errors import DataError
from nbgpu.machine import interpreter
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.predictions import Job

_log = logging.getLogger("nbgpu.data")

_BAD_DATA = 3
"""The exit code of `nbgpu.recipes.check`."""


def require_good_data(config: TrainConfig) -> None:
    """Raise DataError with a line for every bad row of the data and every bad file, if there are any.

    It takes some seconds if there are files, because the process that checks them loads torch. With
    `check_voxels` it also reads each file that no earlier check has found good.
    """
    # Generated data need no check, but the settings may name other files, such as a network's weights.
    named = [path for name in type(config).model_fields for path in paths_to_read(config, name)]
    if named or config.data not in type(config).WITHOUT_FILES:
        _check_in_process("training", config.model_dump_json())


def require_good_new_data(job: Job) -> None:
    """Raise DataError with a line for every file of the new data that is bad by its name or header."""
    _, config = runs.read_settings(Path(job.run_folder))
    if job.data not in type(config).WITHOUT_FILES:
        _check_in_process("prediction", json.dumps(asdict(job)))


def _check_in_process(purpose: str, text: str) -> None:
    """Have a process with torch check the data; raise DataError with what it has found.

    Args:
        purpose: 'training' or 'prediction'.
        text: the settings or the job, as JSON.
    """
    command = interpreter.command("nbgpu.recipes.check", str(os.getpid()), purpose)
    # The process itself reports the steps that take long.
    done = subprocess.run(command, input=text, stderr=subprocess.PIPE, text=True)
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
