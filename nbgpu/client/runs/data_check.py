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
    """Check the data of a training run; raise DataError with a line for every bad row and every bad file.

    If there are files, this takes some seconds, because the process that checks them imports torch. With
    `check_voxels` the process also reads the contents of each file that no earlier check has passed.
    """
    # Generated data need no check, but the settings may name other files, such as a network's weights.
    files = [path for name in type(config).model_fields for path in paths_to_read(config, name)]
    if files or config.data not in type(config).WITHOUT_FILES:
        _check_in_process("training", config.model_dump_json())


def require_good_new_data(job: Job) -> None:
    """Check the data of a prediction; raise DataError with a line for every file with a bad name or
    header."""
    _, config = runs.read_settings(Path(job.run_folder))
    if job.data not in type(config).WITHOUT_FILES:
        _check_in_process("prediction", json.dumps(asdict(job)))


def _check_in_process(purpose: str, text: str) -> None:
    """Check the data in a process with torch; raise DataError with the problems that it reports.

    Args:
        purpose: 'training' or 'prediction'.
        text: the settings or the job, as JSON.
    """
    command = interpreter.command("nbgpu.recipes.check", str(os.getpid()), purpose)
    # The process shows its progress on stdout.
    completed = subprocess.run(command, input=text, stderr=subprocess.PIPE, text=True)
    if completed.returncode == _BAD_DATA:
        raise DataError(completed.stderr.strip())
    if completed.returncode != 0:
        # The start goes on: unless the process was killed, the ranks raise the same error with a traceback.
        _log.warning(
            "the data were not checked before the start, because the process that reads them ended with code %d: %s",
            completed.returncode,
            completed.stderr.strip().rpartition("\n")[2] or "it said nothing",
        )
