"""nbgpu's trainer beside loops that were written by hand, and one rank beside two."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.recipes.phantoms import phantom
from nbgpu.records import Sample
from nbgpu.telemetry import Reader

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
LOOPS = Path(__file__).with_name("loops.py")
PATCH_SIZE, NUM_PHANTOMS, BATCH_SIZE = 16, 128, 4
STEPS, WARM_UP_STEPS = 300, 20
SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": PATCH_SIZE,
    "num_phantoms": NUM_PHANTOMS,
    "val_fraction": 0,
    "val_every": 0,
    "threads": 1,
}


@contextmanager
def volumes() -> Iterator[Path]:
    """A file with the phantoms that all of them train on."""
    with tempfile.TemporaryDirectory() as folder:
        stacked = torch.stack([torch.as_tensor(phantom(PATCH_SIZE, 0, i)) for i in range(NUM_PHANTOMS)])
        torch.save(stacked.reshape(NUM_PHANTOMS, 1, *[PATCH_SIZE] * 3).float(), Path(folder, "volumes.pt"))
        yield Path(folder, "volumes.pt")


def by_hand(who: str, file: Path) -> float:
    """Steps per second of one of the loops in loops.py; 'fabric' and 'accelerate' are in an environment of their own."""
    python = sys.executable if who == "plain" else str(PEERS_PYTHON)
    arguments = [str(LOOPS), who, str(file), str(STEPS), str(BATCH_SIZE)]
    return float(_torchrun(python, 2, arguments).splitlines()[-1])


def ours(num_ranks: int = 2, steps: int = STEPS, **settings: Any) -> float:
    """Steps per second of nbgpu's trainer under torchrun, with everything recorded as always."""
    with tempfile.TemporaryDirectory() as folder:
        config = train_config(
            "autoencoder",
            **{**SETTINGS, "batch_size": BATCH_SIZE, "steps": steps, "runs_dir": folder, **settings},
        )
        write_toml(Path(folder, "run.toml"), ClusterConfig(gpus="none"), config)
        _torchrun(sys.executable, num_ranks, ["-m", "nbgpu.engine.train", str(Path(folder, "run.toml"))])
        (run_folder,) = Path(folder).glob("*/")
        records, _ = Reader(run_folder, num_ranks, live=False).since(0)
    step_s = [
        r.values["step_s"]
        for r in records
        if isinstance(r, Sample) and r.rank == 0 and "step_s" in r.values and r.step > WARM_UP_STEPS
    ]
    return len(step_s) / sum(step_s)


def _torchrun(python: str, num_ranks: int, arguments: Sequence[str]) -> str:
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=600, cwd=REPOSITORY, env=environment
    )
    return done.stdout
