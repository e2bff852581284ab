"""Loading of the trained model in a run's folder, in any process that has torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from nbgpu.config import OwnConfig, TrainConfig
from nbgpu.engine.checkpoints import files as checkpoints
from nbgpu.engine.model import precision, randomness
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
    return load_model(Path(run_folder).absolute(), which, trust=trust)


def load_model(folder: Path, which: Path | Literal["newest", "best"], *, trust: bool = False) -> nn.Module:
    """Build the recipe's model on the CPU in evaluation mode, and load the weights of a checkpoint, or the
    averaged weights if the checkpoint has them.

    Args:
        folder: the run's folder.
        which: the folder of the checkpoint, or the newest intact or the best checkpoint of the run.
        trust: whether a recipe file in the run's folder may be executed.
    """
    _, config = runs.read_settings(folder)
    require_trust(config, folder, trust)
    # Settings that only the start of training needs, such as a file of pretrained weights, are set to their
    # defaults, because the file may be gone, and the checkpoint has all weights.
    if at_start := type(config).ONLY_AT_START:
        config = config.counting(**{name: type(config).model_fields[name].default for name in at_start})
    path = which if isinstance(which, Path) else _checkpoint(folder, which)
    # Drawing the initial weights must not change the state of the caller's random number generators.
    with randomness.kept(of_gpus=False):
        model = by_name.load(config, folder).build_model().to(precision.dtype(config))
    tensors, _ = checkpoints.load(path)
    part = "average." if any(name.startswith("average.") for name in tensors) else "model."
    model.load_state_dict(
        {n.removeprefix(part): tensor for n, tensor in tensors.items() if n.startswith(part)}
    )
    return model.eval()


def require_trust(config: TrainConfig, folder: Path, trust: bool) -> None:
    """Raise ConfigError for a run of a user's own recipe, unless its file is trusted."""
    if isinstance(config, OwnConfig) and not trust:
        file = folder / Path(config.recipe).name
        raise ConfigError(
            f"the model of this run is made by {file}, whose code would run with all of your permissions. If you trust it: "
            "load_trained(run_folder, trust=True), or nbgpu predict --trust"
        )


def _checkpoint(folder: Path, which: Literal["newest", "best"]) -> Path:
    """Return the folder of the newest intact checkpoint, or of that with the best validation result; RunError
    if there is none, or if `best.json` cannot be read."""
    if which == "newest":
        checkpoint = checkpoint_files.newest_whole(folder).checkpoint
    else:
        try:
            best = checkpoint_files.best(folder)
        except ValueError as error:
            raise RunError(str(error)) from None
        checkpoint = None if best is None else best.checkpoint
    if checkpoint is None:
        raise RunError(f"{folder} has no {'intact' if which == 'newest' else 'best'} checkpoint")
    return checkpoint
