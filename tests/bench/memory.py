"""Prints the table of docs/scaling.md: the memory of a step's tensors on two CPU ranks beside the prediction.

python tests/bench/memory.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import nbgpu

RECIPES: dict[str, dict[str, Any]] = {
    "autoencoder": {"data": "phantoms", "patch_size": 16, "channels": (16, 32, 64), "batch_size": 4},
    "diffusion": {"data": "phantoms", "batch_size": 4},
    "survival": {"batch_size": 4, "widen_factor": 0.125},
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"batch_size": 2},
    {"batch_size": 8},
    {"batch_size": 16},
    {"gradient_as_bucket_view": False},
    {"checkpoint_activations": True},
    {"amp": "bf16"},
    {"amp": "bf16", "checkpoint_activations": True},
    {"ema_decay": 0.99},
    {"accumulate": 2},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "checkpoint_activations": True},
    {"strategy": "fsdp", "amp": "bf16"},
    {"strategy": "fsdp", "accumulate": 2},
]


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the heading, and then a row for each recipe and change."""
    yield "recipe", "changed", "measured, MiB", "predicted, MiB", "off by"
    yield "---", "---", "---:", "---:", "---:"
    with nbgpu.Cluster(gpus="none", ranks=2):
        for recipe, settings in RECIPES.items():
            for changed in CHANGES:
                found = nbgpu.memory(recipe, **{**settings, **changed})
                # The rank where the prediction is off most.
                assert found.error is not None, found.predicted.unknown
                predicted_bytes = found.predicted.tensors_bytes
                assert predicted_bytes is not None
                measured_bytes = predicted_bytes / (1 + found.error)
                yield (
                    recipe,
                    ", ".join(f"{name}={value!r}" for name, value in changed.items()) or "nothing",
                    f"{measured_bytes / 2**20:.2f}",
                    f"{predicted_bytes / 2**20:.2f}",
                    f"{found.error:+.1%}",
                )


if __name__ == "__main__":
    for row in rows():
        print("| " + " | ".join(row) + " |", flush=True)
