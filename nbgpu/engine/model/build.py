"""Builds the model of a run on its device, with the changes that the settings ask for."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from nbgpu.config import TrainConfig
from nbgpu.engine.model import batchnorm, precision
from nbgpu.engine.workload.recipe import Recipe


def build(config: TrainConfig, recipe: Recipe, device: torch.device) -> tuple[nn.Module, list[str]]:
    """Return (the model, notes for the person). Every rank draws the same weights.

    With fsdp the model stays in host memory: `fully_shard` brings it to the device block by block, so that
    the whole model need not fit there.
    """
    notes = []
    torch.manual_seed(config.seed)
    model = recipe.build_model()
    if config.sync_batchnorm:
        model, num_layers = batchnorm.synchronise(model, device)
        notes.append(f"sync_batchnorm: {num_layers} BatchNorm layers were converted")
    place = torch.device("cpu") if config.strategy == "fsdp" else device
    model = model.to(place, precision.dtype(config))
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    if config.checkpoint_activations:
        for block in recipe.blocks(model):
            block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
    if config.compile:
        # `model.compile()` does nothing for a Sequential (seen with torch 2.13). This way names stay the
        # same, too.
        model.forward = torch.compile(model.forward)
    return model, notes
