"""Every preset trains: a smoke test of each with real engines, on small data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nbgpu
from nbgpu.config import TRAIN_CONFIGS, presets
from nbgpu.run_folder import folder as runs

# What makes a preset's data and network small; all else is the preset's.
SMALL: dict[str, dict[str, Any]] = {
    "autoencoder": {"data": "phantoms", "num_phantoms": 12, "patch_size": 16, "channels": (32, 32, 32)},
    "diffusion": {
        "num_phantoms": 12,
        "size": 16,
        "channels": (32, 32),
        "attention_edges": (),
        "norm_groups": 8,
        # Processors without AVX-512 emulate bf16, which takes minutes.
        "amp": "off",
    },
    "lithography": {"num_masks": 12, "source_cells": 5, "num_kernels": 8},
    "microstructure": {"shape": (16, 16, 16), "limit_to": 4, "steps": 3, "val_every": 0},
    "survival": {"num_patients": 24, "image_size": (24, 24, 16), "widen_factor": 0.125},
}


def _presets() -> list[Any]:
    """All of them; in the short tests one of each recipe."""
    return [
        pytest.param(recipe, name, marks=[] if number == 1 else [pytest.mark.long], id=f"{recipe}: {name}")
        for recipe in TRAIN_CONFIGS
        for number, name in enumerate(presets.names(recipe))
    ]


@pytest.mark.parametrize(("recipe", "name"), _presets())
def test_a_preset_trains(recipe: str, name: str, cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    short = {"smoke_test": True, "threads": 1} if TRAIN_CONFIGS[recipe].PREDICTS else {}
    run = cluster2.train(recipe, preset=name, **SMALL.get(recipe, {}), **short, runs_dir=str(tmp_path))
    run.wait(400)
    assert run.status == "finished", run.failures
    # Its folder says what it was, with the preset's own numbers.
    _, config = runs.read_settings(run.folder)
    kept = {
        "lr",
        "optimizer",
        "weight_decay",
        "ties",
        "prediction",
        "recon_loss",
        "descriptor_types",
        "source",
    }
    values = presets.read(recipe, name).values
    assert kept & values.keys()
    assert {key: getattr(config, key) for key in kept & values.keys()} == {
        key: values[key] for key in kept & values.keys()
    }
