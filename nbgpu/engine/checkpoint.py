"""A run's state on disk: tensors as safetensors, everything else as JSON, nothing that executes when read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, about: dict[str, Any]) -> Path:
    """Writes `checkpoints/step-N` under the run's folder, whole or not at all.

    Args:
        folder: the run's folder.
        step: optimizer steps done.
        model: the bare network, not wrapped in DDP.
        about: JSON to keep beside the tensors, such as the settings and the schedule's state.

    Returns:
        The checkpoint's folder: model.safetensors, optimizer.safetensors, state.json.
    """
    final = folder / "checkpoints" / f"step-{step:08d}"
    unfinished = final.with_name(final.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, unfinished / "model.safetensors")
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {
        f"{index}.{name}": value for index, values in state["state"].items() for name, value in values.items()
    }
    save_file(tensors, unfinished / "optimizer.safetensors")
    text = json.dumps({"step": step, "param_groups": state["param_groups"], **about}, indent=2)
    (unfinished / "state.json").write_text(text + "\n")
    # Over a network file system a rename is what other readers see all at once.
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    return final


def load_model(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Fills the network with a checkpoint's weights, and returns its state.json."""
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    about: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return about
