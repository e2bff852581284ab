"""The checkpoint of a run that a person asks for: the newest one, or the best one, with nothing wrong."""

from __future__ import annotations

import logging
from pathlib import Path

from nbgpu.errors import RunError
from nbgpu.run_folder import checkpoint_files

_log = logging.getLogger("nbgpu.run")


def newest(run_folder: Path) -> Path:
    """Return the newest checkpoint with nothing wrong. Damaged ones that are newer are logged.

    Raises:
        RunError: there is none; the message names those that are damaged.
    """
    found = checkpoint_files.newest_whole(run_folder)
    damaged = "; ".join(f"{path.name} is damaged ({what})" for path, what in found.damaged)
    if found.checkpoint is None:
        raise RunError(
            f"{run_folder.name} has no intact checkpoint: {damaged}"
            if damaged
            else f"{run_folder.name} has no checkpoint yet: one is written at the end, "
            "and after every `checkpoint_every` steps"
        )
    if damaged:
        _log.warning("%s; the newest intact checkpoint is %s", damaged, found.checkpoint.name)
    return found.checkpoint


def best(run_folder: Path, best_metric: str) -> Path:
    """Return the checkpoint with the best validation.

    Args:
        run_folder: the run's folder.
        best_metric: the setting of the run; empty where it follows no validation value.

    Raises:
        RunError: there is none, or it is damaged.
    """
    try:
        found = checkpoint_files.best(run_folder)
    except ValueError as error:
        raise RunError(str(error)) from None
    if found is None:
        why = (
            "none was validated yet"
            if best_metric
            else "it follows no validation value. Set best_metric='loss' before a run"
        )
        raise RunError(f"{run_folder.name} has no best checkpoint: {why}")
    if what := checkpoint_files.damage(found.checkpoint):
        raise RunError(
            f"the best checkpoint of {run_folder.name}, {found.checkpoint}, is damaged ({what}). "
            "run.checkpoint() is the newest intact one"
        )
    return found.checkpoint
