"""The mean of a validation is over samples: a last batch that is smaller counts as much as it holds."""

from __future__ import annotations

import torch

from nbgpu.engine.training.validation import _local_sums


def test_a_smaller_last_batch_counts_by_its_samples() -> None:
    assert _local_sums({"loss": values} for values in torch.arange(5.0).split(2)) == ({"loss": 10.0}, 5)
