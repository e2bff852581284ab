"""Loading of a run's trained model from its folder, on a rank, in a notebook, or anywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from nbgpu.config import OwnConfig
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.model import precision
from nbgpu.engine.workload import by_name
from nbgpu.errors import ConfigError, RunError
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as runs


def load_trained(
    run_folder: str | Path, which: Literal["newest", "best"] = "newest", *, trust: bool = False
) -> nn.Module:
    """Return the recipe's model on the CPU in evaluation mode, with the weights of a checkpoint, or its
    averaged weights if it has them.

    Args:
        run_folder: the run's folder, `run.folder`; it may have come from another machine.
        which: the newest complete checkpoint, or the one with the best validation result (`best_metric`).
        trust: whether to run the recipe file in the folder, for a run of a user's own recipe. Its code can do
            everything that you can; read it first if the folder came from somebody else.

    Raises:
        ConfigError: the folder's settings cannot be read, or it has a recipe file and `trust` is false.
        RunError: there is no such checkpoint, or it is damaged.
    """
    folder = Path(run_folder).absolute()
    _, config = runs.read_settings(folder)
    if isinstance(config, OwnConfig) and not trust:
        file = folder / Path(config.recipe).name
        raise ConfigError(
            f"the model of this run is made by {file}, and that file would be run with all that you may do. If you trust it: "
            "load_trained(run_folder, trust=True)"
        )
    path = _checkpoint(folder, which)
    with torch.random.fork_rng():
        model = by_name.load(config, folder).build_model().to(precision.dtype(config))
    tensors, _ = checkpoint.load(path)
    part = "average." if any(name.startswith("average.") for name in tensors) else "model."
    model.load_state_dict(
        {n.removeprefix(part): tensor for n, tensor in tensors.items() if n.startswith(part)}
    )
    return model.eval()


def _checkpoint(folder: Path, which: Literal["newest", "best"]) -> Path:
    if which == "newest":
        found = checkpoint_files.newest_whole(folder).checkpoint
    else:
        try:
            best = checkpoint_files.best(folder)
        except ValueError as error:
            raise RunError(str(error)) from None
        found = None if best is None else best.checkpoint
    if found is None:
        raise RunError(f"{folder} has no {'whole' if which == 'newest' else 'best'} checkpoint")
    return found
