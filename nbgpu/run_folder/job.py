"""The identity of a job (a Slurm job, or a torchrun), by which a restarted job finds the folder of its run
and goes on there.

A launcher that restarts a killed job starts the same command with the same identity: the variable NBGPU_JOB,
which exported job files set, or torchrun's TORCHELASTIC_RUN_ID, which is the same for all its restarts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.errors import RunError
from nbgpu.machine import files
from nbgpu.machine.files import write_whole
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import lines, names
from nbgpu.run_folder.resume import AUTO

VARIABLE = "NBGPU_JOB"
AGAIN = "NBGPU_AGAIN"
"""The variable with the path of a file that a run writes if it stops before its end because the time limit of
the job is near."""
_LOCK_PATIENCE_S = 60.0
_LOCK_POLL_S = 0.2


def job_identity(config: TrainConfig) -> str:
    """Return the identity of the job that this process belongs to; empty if there is none, or if the setting
    `resume` is not 'auto'."""
    if config.resume != AUTO:
        return ""
    torchrun_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # torchrun sets 'none' if it was given no id.
    return os.environ.get(VARIABLE) or ("" if torchrun_id == "none" else torchrun_id)


def folder_of(config: TrainConfig, job: str) -> Path | None:
    """Return the folder of this job's newest run with these settings; None if the job has not begun such a
    run."""
    expected = _identification(config, job)
    runs_dir = Path(config.runs_dir).absolute()
    for path in sorted(runs_dir.glob(f"*/{names.JOB}"), reverse=True):
        try:
            # A folder of another user is never continued, whatever its file says.
            if path.parent.lstat().st_uid == os.geteuid() and lines.load(path) == expected:
                return path.parent
        except (OSError, RunError, ValueError):
            continue
    return None


def note(folder: Path, config: TrainConfig, job: str) -> None:
    """Write a run's job and settings to its folder, for `folder_of` after a restart."""
    write_whole(folder / names.JOB, json.dumps(_identification(config, job), indent=2) + "\n")


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder was trained to its last step."""
    return runs.outcome(folder, 0) == "finished"


def hold(folder: Path) -> int:
    """Lock a run's folder, so that no other process continues the same run.

    Returns:
        The file descriptor that holds the lock until it is closed or this process ends.

    Raises:
        RunError: another process has held the lock for a minute, for example because the job was submitted
            twice.
    """
    give_up_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return files.lock_folder(folder)
        except RunError:
            if time.monotonic() > give_up_s:
                raise RunError(
                    f"{folder} is trained by another process, perhaps of the same job on another host. Two would spoil it: "
                    f"end the other one, or give this job another {VARIABLE}"
                ) from None
        time.sleep(_LOCK_POLL_S)


def _identification(config: TrainConfig, job: str) -> dict[str, Any]:
    """Return the content of job.json. A run that is continued must have the same."""
    return {"job": job, "train": json.loads(config.model_dump_json())}
