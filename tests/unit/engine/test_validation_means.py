"""The mean of a validation is over samples: a last batch that is smaller counts as much as it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.engine.training.validation import _local_sums


def test_a_smaller_last_batch_counts_by_its_samples() -> None:
    recipe: Any = SimpleNamespace(validate=lambda _, batch: {"loss": batch["x"]})
    batches = [{"x": values} for values in torch.arange(5.0).split(2)]

    def to_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    step_batches: Any = SimpleNamespace(loaders=SimpleNamespace(val=batches), to_device=to_device)
    state: Any = SimpleNamespace(model=None)
    config = train_config("autoencoder", data="phantoms", batch_size=2)
    assert _local_sums(recipe, state, step_batches, config, torch.device("cpu")) == ({"loss": 10.0}, 5)
