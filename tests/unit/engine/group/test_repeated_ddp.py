"""A new rank repeats the cells that made DDP objects without the other ranks, with the hooks put on them."""

from __future__ import annotations

import subprocess
import sys

import pytest

REPEATED = """
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from nbgpu.engine.group import ddp_objects, torch_private

ddp_objects.note()
torch_private.init_fake_group(0, 2)
{cell}
# On the CPU torch runs no mixed precision.
if ddp.mixed_precision is None:
    ddp(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in ddp.parameters())
print(ddp_objects.registered_hook(ddp))
"""


@pytest.mark.parametrize(
    ("cell", "noted"),
    [
        ("ddp = DistributedDataParallel(nn.Linear(3, 2))", "None"),
        (
            "ddp = DistributedDataParallel(nn.Linear(3, 2))\nddp.register_comm_hook('mine', fp16_compress_hook)",
            "('mine', <function fp16_compress_hook",
        ),
        (
            "half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)\n"
            "ddp = DistributedDataParallel(nn.Linear(3, 2), mixed_precision=half)",
            "None",
        ),
    ],
    ids=["no hook", "a hook", "mixed precision"],
)
def test_a_cell_with_a_ddp_object_is_repeated_to_its_end(cell: str, noted: str) -> None:
    command = [sys.executable, "-c", REPEATED.format(cell=cell)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(noted)
