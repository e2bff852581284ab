"""Sampling of images for cases by a trained network in a distributed cell, with a share of the cases on each
rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nbgpu.engine.data.decoding import Item
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.diffusion.config import DiffusionConfig
from nbgpu.recipes.diffusion.files import MODALITIES, find_cases
from nbgpu.recipes.diffusion.measures import quality
from nbgpu.recipes.diffusion.recipe import Diffusion, as_item
from nbgpu.recipes.trained import load_trained
from nbgpu.run_folder import folder as runs


def sample_share(
    run_folder: str | Path,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
    data: str | Path | None = None,
    max_cases: int | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Sample this rank's share of the cases with the newest checkpoint of a run. No collective is called.

    Args:
        run_folder: the folder of a finished run of this recipe, `run.folder`.
        rank: this rank.
        world_size: the number of ranks.
        device: the device on which the network runs.
        data: a folder of BraTS data whose cases may lack the modality that is made; None takes the cases that
            the run has held out.
        max_cases: the largest number of cases over all ranks; None takes all.
        settings: settings for sampling that replace the run's, such as spacing='all' or eta=1.0.

    Returns:
        For each case its `name`, its `number` among all cases, and `image`, (1, D, H, W) from -1 to 1 on the
        CPU. If the case has the modality that is made, also that modality as `target`, and the measures of
        `quality`.

    Raises:
        ConfigError: the folder is not a run of this recipe, or the settings contradict each other.
        RunError: there is no complete checkpoint.
        DataError: a file cannot be used.
    """
    _, config = runs.read_settings(Path(run_folder))
    if not isinstance(config, DiffusionConfig):
        raise ConfigError(f"{run_folder} is a run of the recipe {config.recipe!r}, and not of 'diffusion'")
    changed = config.counting(size=config.edge, **settings)
    assert isinstance(changed, DiffusionConfig)
    recipe = Diffusion(changed)
    items = recipe.parts().reported if data is None else _new_cases(Path(data).expanduser(), changed.target)
    model = load_trained(run_folder).to(device)
    dtype = next(model.parameters()).dtype
    results: list[dict[str, Any]] = []
    # One case at a time: some may have the modality that is made, and others not.
    for number, item in list(enumerate(items))[:max_cases][rank::world_size]:
        case = recipe.decoded([item], with_masks=True)
        image = recipe.sampler(model, case["condition"].to(device, dtype), [number]).float().cpu()
        result: dict[str, Any] = {"name": item["name"], "number": number, "image": image[0]}
        if "target" in case:
            result["target"] = case["target"][0]
            result |= quality(image, case["target"], case["brain"], case.get("label"))[0]
        results.append(result)
    return results


def _new_cases(folder: Path, target: str) -> list[Item]:
    """Return the cases of a folder as Items; they may lack the modality `target`. DataError has a line for
    each problem with names and headers."""
    cases, problems = find_cases(folder, needed=[name for name in MODALITIES if name != target])
    if problems:
        raise DataError("\n".join(problems))
    return [as_item(case) for case in cases]
