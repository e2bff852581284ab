"""Time the function `step` that a person has defined in a cell."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from nbgpu.engine.group import group
from nbgpu.engine.ipykernel import shell


def measure(num_warm_ups: int, num_steps: int) -> dict[str, Any]:
    """Call `step()` again and again. A collective.

    Args:
        num_warm_ups: calls before those that count.
        num_steps: calls that count.

    Returns:
        `step_s`: the time of each call, until the device has done its work; `samples`: what the last call
        returned if that was a number, the samples that this rank has worked on, otherwise None.

    Raises:
        NameError: the rank has no function `step`.
        TypeError: `step` cannot be called.
    """
    names = shell.current().user_ns
    if "step" not in names:
        raise NameError("the cell must define step(), a function without arguments that does one step")
    step = names["step"]
    if not callable(step):
        raise TypeError(f"step is a {type(step).__name__}. It must be a function without arguments")
    device = group.membership().device
    returned = None
    for _ in range(num_warm_ups):
        returned = step()
    _finish(device)
    # Ranks begin together, so that none waits in its first step for what the others still do.
    dist.barrier()
    step_s = []
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        returned = step()
        _finish(device)
        step_s.append(time.perf_counter() - begun_s)
    is_number = isinstance(returned, int | float) and not isinstance(returned, bool)
    return {"step_s": step_s, "samples": returned if is_number else None}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
