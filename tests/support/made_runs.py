"""Runs whose bottleneck is known, because it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RECIPE = """
import time

import torch
import torch.distributed as dist
from torch import nn

from nbgpu.recipes.own import OwnRecipe


class Samples(torch.utils.data.Dataset):
    def __init__(self, read_s):
        self.read_s = read_s

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.read_s)
        return torch.full((4,), float(index)), torch.ones(1)


class Made(OwnRecipe):
    # What bounds it is made with these.
    read_s: float = 0.0  # time to read a sample
    read_late_s: float = 0.0  # by how much rank 1 needs longer for that
    compute_s: float = 0.05  # time of a forward pass
    late_s: float = 0.0  # by how much rank 1 is slower
    validate_s: float = 0.0  # time of a validation
    width: int = 4
    layers: int = 1
    norms: int = 0
    save_s: float = 0.0  # time to collect the weights for a checkpoint
    batch_size: int = 2
    num_workers: int = 0

    def dataset(self):
        is_late = dist.is_initialized() and dist.get_rank() == 1
        return Samples(self.read_s + (self.read_late_s if is_late else 0.0))

    def model(self):
        layers = [nn.Linear(4, self.width)]
        layers += [nn.Linear(self.width, self.width) for _ in range(self.layers)]
        layers += [nn.BatchNorm1d(self.width) for _ in range(self.norms)]
        model = nn.Sequential(*layers, nn.Linear(self.width, 1))
        model.register_state_dict_pre_hook(lambda *_: time.sleep(self.save_s))
        return model

    def loss(self, model, batch):
        x, y = batch
        if torch.is_grad_enabled():
            time.sleep(self.compute_s + (self.late_s if dist.get_rank() == 1 else 0.0))
        else:
            time.sleep(self.validate_s)
        return (model(x / 64) - y).square().mean()
"""
"""The code of a recipe that sleeps where others compute, so that other work does little to it."""

STEPS: Mapping[str, Any] = {"steps": 12, "work_out_result": False}
LINK = "200Mbit/s,2ms"


@dataclass(frozen=True)
class Case:
    """A run of RECIPE."""

    name: str
    cause: str | None
    """What is to be changed first; None where nothing is."""
    settings: Mapping[str, Any]
    first: str
    """What is said of that; a regular expression."""
    tried: Mapping[str, Any] = field(default_factory=dict)
    """The settings that the first advice changes; empty where nothing can be advised."""
    link: str = ""
    """A simulated link."""


_PLAIN = {"val_every": 0}
CASES = (
    Case(
        "nothing but computation",
        None,
        _PLAIN | {"compute_s": 0.2},
        "Computation bounds this run",
    ),
    Case(
        "a slow reader",
        "data",
        _PLAIN | {"read_s": 0.03},
        "[Aa] step waits",
        {"num_workers": 2},
    ),
    Case(
        "a slow reader on rank 1",
        "data",
        _PLAIN | {"read_late_s": 0.03},
        "[Rr]ank 1, for which the others wait",
        {"num_workers": 2},
    ),
    Case("a slower rank", "imbalance", _PLAIN | {"late_s": 0.1}, "[Rr]ank 0 waits .* for rank 1"),
    Case(
        "a validation after each step",
        "validation",
        {"val_every": 1, "validate_s": 0.03, "compute_s": 0.03, "val_fraction": 0.1},
        "[Vv]alidation.*for each step",
        {"val_every": 32},
    ),
    Case(
        "a checkpoint after each step",
        "checkpoints",
        _PLAIN | {"checkpoint_every": 1, "save_s": 0.05, "compute_s": 0.03},
        "[Cc]heckpoints.*for each step",
        {"checkpoint_every": 0},
    ),
    Case(
        "BatchNorm over all ranks in ten layers",
        "statistics",
        _PLAIN | {"norms": 10, "sync_batchnorm": True, "compute_s": 0.1},
        "is their exchange between the ranks",
        {"sync_batchnorm": False},
        LINK,
    ),
    Case(
        "tiny buckets",
        "communication",
        _PLAIN | {"width": 64, "layers": 8, "bucket_mb": 0.016, "compute_s": 0.02},
        "exchange of gradients.* latency of its",
        {"bucket_mb": 1.0},
        LINK,
    ),
    Case(
        "a slow link",
        "communication",
        _PLAIN | {"width": 512, "layers": 4, "compute_s": 0.05},
        "exchange of gradients.* the link's rate",
        {"comm_hook": "fp16"},
        LINK,
    ),
    Case(
        "a slow link, and gradients of 16 bits",
        "communication",
        _PLAIN | {"width": 512, "layers": 4, "compute_s": 0.05, "comm_hook": "fp16"},
        "exchange of gradients.* the link's rate",
        {"accumulate": 2},
        LINK,
    ),
)
