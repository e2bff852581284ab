"""Debug mode: torch compares the ranks' collectives before each one (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""

from __future__ import annotations

import os

import torch.distributed as dist

from nbgpu.engine.group import torch_private


def compare_collectives() -> None:
    """Switch the comparison on for groups that are made from now on."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch_private.read_debug_level()
    mend_ddp()


def mend_ddp() -> None:
    """Make DDP work in debug mode; change nothing where debug mode is off.

    DDP's logger looks for gloo's options in the group, finds the wrapper that compares the collectives, and
    reads it as if it were gloo: a segmentation fault in the constructor (torch 2.13). The options are only
    logged, so that DDP can do without them.
    """
    if torch_private.compares_collectives():
        dist.Logger = torch_private.LoggerWithoutOptions  # type: ignore[attr-defined]
