"""The times of NCCL's collectives by torch's own model, which needs no GPU."""

from __future__ import annotations

import torch

from nbgpu.engine.group import torch_private
from nbgpu.errors import RunError
from nbgpu.performance.nccl import SIZES_BYTES, ranks_of

_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


def seconds(gpu: str, ranks_per_node: int, has_nvlink: bool) -> dict[str, dict[int, list[float]]]:
    """Return seconds by operation and number of ranks for the sizes of `nbgpu.performance.nccl`.

    Args:
        gpu: 'V100', 'A100', 'H100' or 'B200'. Each has the InfiniBand that torch knows with it.
        ranks_per_node: GPUs on each node.
        has_nvlink: whether NVLink joins the GPUs of a node, else PCIe.

    Raises:
        RunError: this version of torch has no such model.
    """
    model = torch_private.nccl_model(gpu, ranks_per_node, has_nvlink)
    if model is None:
        raise RunError(f"torch {torch.__version__} has no model of NCCL's times by GPU: torch 2.13 has")
    return {
        operation: {
            ranks: [model(operation, num_bytes, ranks) for num_bytes in SIZES_BYTES]
            for ranks in ranks_of(ranks_per_node)
        }
        for operation in _OPERATIONS
    }
