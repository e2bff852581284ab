"""Warns once if a rank has tensors on another rank's GPU.

A bare `.cuda(0)`, or `torch.load` of a file written on another GPU, puts them there without an error, and the
memory of one rank's GPU fills up with the tensors of all ranks.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from nbgpu.text.sizes import in_words

_SHORTEST_CELL_S = 0.02
"""A process's first tensor on a GPU takes longer than this, because CUDA makes a context there. So a shorter
cell is not worth the check, which takes about 0.1 ms for each GPU."""


def warn_of_memory_on_other_gpus(shell: Any, device: torch.device) -> None:
    """After each cell, check whether this process has allocated memory on a GPU other than its own. Warn
    once, in the output of the cell after which that is first seen.

    Args:
        shell: IPython's shell of the engine.
        device: the rank's own device; on the CPU nothing is done. Every other GPU that torch sees belongs to
            another rank.
    """
    if device.type != "cuda":
        return
    started_mono_s = 0.0

    def note_start(_: Any) -> None:
        nonlocal started_mono_s
        started_mono_s = time.monotonic()

    def check_allocations(_: Any) -> None:
        """Print a warning if torch's allocator has memory of another GPU, and then check no more."""
        if time.monotonic() - started_mono_s < _SHORTEST_CELL_S:
            return
        others = [index for index in range(torch.cuda.device_count()) if index != device.index]
        sizes = {index: torch.cuda.memory_reserved(index) for index in others}
        allocated = [f"{in_words(size)} on cuda:{index}" for index, size in sizes.items() if size]
        if not allocated:
            return
        shell.events.unregister("pre_run_cell", note_start)
        shell.events.unregister("post_run_cell", check_allocations)
        print(  # noqa: T201 - the cell's output
            f"this rank has {' and '.join(allocated)}, and its own GPU is {device}: write .to(device) in place of .cuda(0), and "
            "torch.load(..., map_location=device). What is there counts against another rank's memory",
            file=sys.stderr,
        )

    shell.events.register("pre_run_cell", note_start)
    shell.events.register("post_run_cell", check_allocations)
