"""The identity of the job that a run belongs to, by which a run that is started again goes on in its own
folder.

A launcher that restarts a killed job starts the same command with the same identity. The exported files give
it in NBGPU_JOB; torchrun gives its own in TORCHELASTIC_RUN_ID, the same for all restarts of one torchrun.
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
"""Names a file that a run leaves where it stopped because the job's time is up, before it was done."""
_LOCK_PATIENCE_S = 60.0
_LOCK_POLL_S = 0.2


def job_identity(config: TrainConfig) -> str:
    """Return the identity of the job that this process belongs to; empty if there is none, or if the setting
    `resume` is not 'auto'."""
    if config.resume != AUTO:
        return ""
    own = os.environ.get(VARIABLE, "")
    of_torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # torchrun sets 'none' if it was given no id.
    return own or ("" if of_torchrun == "none" else of_torchrun)


def folder_of(config: TrainConfig, job: str) -> Path | None:
    """Return the newest folder of a run of this job with these settings; None if the job begins its first
    run."""
    asked = _as_asked(config, job)
    runs_dir = Path(config.runs_dir).absolute()
    for path in sorted(runs_dir.glob(f"*/{names.JOB}"), reverse=True):
        try:
            # Another user's run is none of this job's.
            is_same = path.parent.lstat().st_uid == os.geteuid() and lines.load(path) == asked
        except (OSError, RunError, ValueError):
            continue
        if is_same:
            return path.parent
    return None


def note(folder: Path, config: TrainConfig, job: str) -> None:
    """Write a run's job and settings to its folder, for `folder_of` after a restart."""
    write_whole(folder / names.JOB, json.dumps(_as_asked(config, job), indent=2) + "\n")


def is_finished(folder: Path) -> bool:
    """Return whether the run of a folder has come to its end."""
    return runs.outcome(folder, 0) == "finished"


def hold(folder: Path) -> int:
    """Lock a run's folder, so that no other process goes on with the same run.

    Returns:
        The descriptor that holds the lock, to this process's end at most.

    Raises:
        RunError: another process has held the lock for a minute, as where a job was submitted twice.
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


def _as_asked(config: TrainConfig, job: str) -> dict[str, Any]:
    return {"job": job, "train": json.loads(config.model_dump_json())}
