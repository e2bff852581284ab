"""The folder of a training run: where it is, and what it says about how the run came to be."""

from __future__ import annotations

import json
import logging
import platform
import secrets
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from nbgpu import resume
from nbgpu.config import ClusterConfig, TrainConfig, write_toml
from nbgpu.devices import inventory

_log = logging.getLogger("nbgpu.runs")

_PACKAGES = ("nbgpu", "torch", "monai", "ipyparallel", "ipykernel", "plotly", "numpy")


def create(config: TrainConfig, cluster: ClusterConfig) -> Path:
    """Makes the folder of a new run, which only the user can enter, with run.toml and env.json in it.

    Where the run goes on from a checkpoint, resume.json says from which one. Nothing is made where there is no
    such checkpoint, or none that fits: raises as `resume.find` does.
    """
    beginning = resume.find(config)
    for note in beginning.notes:
        _log.warning(note)
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.runs_dir).absolute() / f"{started}-{config.recipe}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True, mode=0o700)
    write_toml(folder / "run.toml", cluster, config)
    if config.resume:
        beginning.write(folder)
    (folder / "env.json").write_text(json.dumps(_environment(), indent=2) + "\n")
    return folder


def _environment() -> dict[str, Any]:
    """What a person needs to know to repeat the run: versions, devices, the state of the working tree."""
    git = shutil.which("git")
    described = (
        subprocess.run([git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        if git
        else None
    )
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "gpus": [{"name": d.name, "uuid": d.uuid} for d in inventory()],
        "git": described.stdout.strip() if described is not None and described.returncode == 0 else None,
    }
