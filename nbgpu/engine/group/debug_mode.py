"""Debug mode: torch compares the ranks' collectives before each one (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, Logger, get_debug_level, set_debug_level_from_env


def compare_collectives() -> None:
    """Switches the comparison on, for groups that are made from now on."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    set_debug_level_from_env()
    mend_ddp()


def mend_ddp() -> None:
    """Makes DDP work in debug mode; changes nothing where that is off.

    DDP's logger looks for gloo's options in the group, finds the wrapper that compares the collectives, and
    reads it as if it were gloo: a segmentation fault in the constructor (torch 2.13). It logs only, so it goes
    without.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        dist.Logger = _LoggerWithoutOptions  # type: ignore[attr-defined]


class _LoggerWithoutOptions(Logger):
    def set_construction_data_and_log(self, *_: Any) -> None:
        pass
