"""The held-out cases of a trained run, sampled by all ranks, each its share; for a distributed cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nbgpu.config import DiffusionConfig, read_toml
from nbgpu.errors import ConfigError
from nbgpu.recipes.diffusion.recipe import Diffusion, quality
from nbgpu.recipes.trained import load_trained


def sample_share(
    run_folder: str | Path,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
    max_cases: int | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """The rank's share of the run's held-out cases, sampled with its newest checkpoint. No collective.

    Args:
        run_folder: of a finished run of this recipe, `run.folder`.
        max_cases: over all ranks; None takes all.
        settings: other ones for sampling than the run's, such as spacing='all' or eta=1.0.

    Returns:
        For each case its `name`, its `number` among the held-out ones, `image` and `target` as (1, D, H, W) from -1 to 1 on the CPU,
        `psnr_db` and `ssim`.

    Raises:
        ConfigError: the folder is no run of this recipe, or the settings do not go together.
        RunError: there is no whole checkpoint.
        DataError: a file cannot be used.
    """
    _, config = read_toml(Path(run_folder) / "run.toml")
    if not isinstance(config, DiffusionConfig):
        raise ConfigError(f"{run_folder} is a run of the recipe {config.recipe!r}, and not of 'diffusion'")
    changed = config.changed(**settings)
    assert isinstance(changed, DiffusionConfig)
    recipe = Diffusion(changed)
    model = load_trained(run_folder).to(device)
    dtype = next(model.parameters()).dtype
    _, held_out = recipe.items()
    numbered = list(enumerate(held_out))[:max_cases][rank::world_size]
    found: list[dict[str, Any]] = []
    for start in range(0, len(numbered), changed.batch_size):
        chosen = numbered[start : start + changed.batch_size]
        data = recipe.decoded([item for _, item in chosen])
        numbers = [number for number, _ in chosen]
        made = recipe.sampler(model, data["condition"].to(device, dtype), numbers).float().cpu()
        for index, (row, (number, item)) in enumerate(
            zip(quality(made, data["target"]), chosen, strict=True)
        ):
            images = {"image": made[index], "target": data["target"][index]}
            found.append({"name": item["name"], "number": number, **images, **row})
    return found
