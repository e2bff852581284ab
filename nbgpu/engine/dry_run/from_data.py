"""Chooses the settings that are left to the data: by the files, and by the memory that steps would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.dry_run import memory
from nbgpu.engine.group import torch_settings
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.recipe import Proposal, Proposing
from nbgpu.errors import ConfigError
from nbgpu.protocol.records import Chosen
from nbgpu.text.sizes import in_words

_MARGIN = 1.3
"""The memory that steps are expected to take, as a multiple of the estimate for their tensors: libraries and
allocators take more."""


@torch_settings.as_at_the_beginning()
def choose(settings: dict[str, Any], on_gpu: bool, memory_bytes: int) -> Chosen:
    """Return values for the settings that are left to the data: the recipe's first proposal whose steps fit
    into the memory, or else its last one. No collective.

    Args:
        settings: all fields of a TrainConfig.
        on_gpu: whether the ranks have GPUs.
        memory_bytes: the memory of each rank, in bytes.

    Raises:
        ConfigError: no proposal goes with the other settings.
        DataError: no file can be used.
    """
    config = train_config(**settings)
    recipe: object = by_name.load(config, complete=False)
    assert isinstance(recipe, Proposing), "a recipe whose settings have FROM_DATA has proposals"
    valid, refused = [], None
    for proposal in recipe.proposals(on_gpu):
        try:
            valid.append((proposal, config.changed(**proposal.values)))
        except ConfigError as error:
            refused = error
    if not valid:
        assert refused is not None, "there is at least one proposal"
        raise refused
    for proposal, made in valid[:-1]:
        if _fits(made, memory_bytes):
            return _chosen(proposal, memory_bytes)
    return _chosen(valid[-1][0], memory_bytes)


def complete(config: TrainConfig) -> TrainConfig:
    """Return the settings, and for those that are left to the data the values of the first proposal: good
    enough to read the files."""
    recipe: object = by_name.load(config, complete=False)
    if not config.left_to_data or not isinstance(recipe, Proposing):
        return config
    return config.changed(**recipe.proposals(on_gpu=False)[0].values)


def _fits(config: TrainConfig, memory_bytes: int) -> bool:
    """Return whether the steps of these settings fit into the memory, by an estimate; True if there is
    none."""
    estimate: Mapping[str, Any] = memory.run_memory(config)
    # Without an estimate, such as for a model that reads values, only the run itself can show it.
    return "peak" not in estimate or estimate["peak"] * _MARGIN <= memory_bytes


def _chosen(proposal: Proposal, memory_bytes: int) -> Chosen:
    named = ", ".join(f"{name}={value}" for name, value in proposal.values.items())
    sentence = f"chosen, because left out: {named} ({proposal.why}; {in_words(memory_bytes)} of memory for each rank)"
    return Chosen(dict(proposal.values), (sentence,))
