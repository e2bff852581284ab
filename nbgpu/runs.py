"""The folder of a training run: where it is, and what it says about how the run came to be."""

from __future__ import annotations

import json
import platform
import secrets
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from nbgpu.config import ClusterConfig, TrainConfig, write_toml
from nbgpu.devices import inventory

_PACKAGES = ("nbgpu", "torch", "monai", "ipyparallel", "ipykernel", "plotly", "numpy")


def create(config: TrainConfig, cluster: ClusterConfig) -> Path:
    """Makes the folder of a new run, which only the user can enter, with run.toml and env.json in it."""
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.runs_dir).absolute() / f"{started}-{config.recipe}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True, mode=0o700)
    write_toml(folder / "run.toml", cluster, config)
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
