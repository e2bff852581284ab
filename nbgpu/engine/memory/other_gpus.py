"""Say once that a rank has tensors on another rank's GPU.

A bare `.cuda(0)`, or `torch.load` of what another GPU has written, puts them there without an error, and the
memory of one rank's GPU fills up with those of all.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from nbgpu.text.sizes import in_words

_SHORTEST_CELL_S = 0.02
"""A process's first tensor on a GPU takes longer than this, because CUDA makes a context there. So a shorter
cell is not worth the look, which takes about 0.1 ms for each GPU."""


def explain_after_cells(shell: Any, device: torch.device) -> None:
    """Look after each cell of this shell until something was found.

    Args:
        shell: the engine's.
        device: the rank's. Every other GPU that torch sees has a rank of its own.
    """
    if device.type != "cuda":
        return
    begun_mono_s = 0.0

    def note_begin(_: Any) -> None:
        nonlocal begun_mono_s
        begun_mono_s = time.monotonic()

    def look(_: Any) -> None:
        if time.monotonic() - begun_mono_s < _SHORTEST_CELL_S:
            return
        others = [index for index in range(torch.cuda.device_count()) if index != device.index]
        sizes = {index: torch.cuda.memory_reserved(index) for index in others}
        taken = [f"{in_words(size)} on cuda:{index}" for index, size in sizes.items() if size]
        if not taken:
            return
        shell.events.unregister("pre_run_cell", note_begin)
        shell.events.unregister("post_run_cell", look)
        print(  # noqa: T201 - the cell's output
            f"this rank has {' and '.join(taken)}, and its own GPU is {device}: write .to(device) in place of .cuda(0), and "
            "torch.load(..., map_location=device). What is there counts against another rank's memory",
            file=sys.stderr,
        )

    shell.events.register("pre_run_cell", note_begin)
    shell.events.register("post_run_cell", look)
