"""A run's state on disk: tensors as safetensors, everything else as JSON, nothing that executes when read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> Path:
    """Writes `checkpoints/step-N` under the run's folder, whole or not at all.

    Args:
        folder: the run's folder.
        step: optimizer steps done.
        tensors, about: as `Trainer.state` gives them; `about` may have more.

    Returns:
        The checkpoint's folder: model.safetensors, optimizer.safetensors, state.json.
    """
    final = folder / "checkpoints" / f"step-{step:08d}"
    unfinished = final.with_name(final.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for part in ("model", "optimizer"):
        own = {
            k.removeprefix(f"{part}."): v.contiguous() for k, v in tensors.items() if k.startswith(f"{part}.")
        }
        save_file(own, unfinished / f"{part}.safetensors")
    (unfinished / "state.json").write_text(json.dumps(about, indent=2) + "\n")
    # Over a network file system a rename is what other readers see all at once.
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    return final


def load_model(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Fills the network with a checkpoint's weights, and returns its state.json."""
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    about: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return about
