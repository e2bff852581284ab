"""The error message of a cell that ran out of memory, and the release of its functions' variables.

torch and numpy say how much memory the failed operation needed. The person needs the names of the variables
that hold the rest.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nbgpu.engine.frames import is_library
from nbgpu.engine.group import group
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory.limit import undisturbed
from nbgpu.engine.memory.usage import (
    Usage,
    asked_in_words,
    free,
    is_exhausted,
    largest,
    let_go,
    mend_onednn,
    refused,
)
from nbgpu.errors import OutOfMemoryError
from nbgpu.text.sizes import in_words

_NUM_VARIABLES_NAMED = 6


def explain_failed_cells(shell: Any, device: torch.device) -> None:
    """After each cell of this shell that ran out of memory, explain the error, and free the variables of the
    functions that were running.

    The person's variables stay. The others must be freed here, because a traceback keeps all frames, and a
    frame its tensors.

    Args:
        shell: the engine's.
        device: the rank's.
    """

    def give_back(result: Any) -> None:
        """Replace the error of a cell that ran out of memory by one that explains it, and free the variables
        of the functions in its traceback."""
        error = result.error_in_exec if result is not None else None
        if error is None:
            return
        with undisturbed():
            if is_exhausted(error):
                # ipykernel makes the reply from these two.
                result.error_in_exec = _explained(error, group.membership().rank, device, shell.user_ns)
                report = result.error_in_exec._render_traceback_()
                shell._last_traceback = [*report, "", *(shell._last_traceback or [])]
                let_go(error)
                free()

    shell.events.register("pre_run_cell", lambda _: memory_limit.tighten())
    shell.events.register("post_run_cell", give_back)


def _explained(
    error: BaseException, rank: int, device: torch.device, variables: Mapping[str, Any]
) -> OutOfMemoryError:
    """Return the error to show for a cell that ran out of memory.

    Args:
        error: the error of torch, numpy or Python. The variables of the functions in its traceback are named
            too.
        rank: this rank.
        device: the rank's device.
        variables: the rank's variables, by name.
    """
    device, asked = refused(error, device)
    usage = Usage.of(device)
    lines = [
        f"rank {rank} ran out of memory",
        f"asked for: {asked_in_words(asked)}",
        f"peak: {usage.in_words(device)}",
    ]
    named = largest(_named_values(error, variables), device)
    shown = named[:_NUM_VARIABLES_NAMED]
    if shown:
        lines.append("held by:")
        lines += [f"  {what}, {in_words(num_bytes)}" for what, num_bytes in shown]
        rest_bytes = usage.used_bytes - sum(num_bytes for _, num_bytes in shown)
        unnamed = "what has no name, such as the activations that backward needs"
        if device.type == "cpu":
            unnamed += ", Python and its libraries"
        lines.append(f"  the rest, {in_words(max(0, rest_bytes))}: smaller ones, and {unnamed}")
    else:
        lines.append("held by: nothing that has a name; no variable holds a tensor there")
    lines.append(
        "What the cell held beside the variables was freed. Free more with: %distributed del NAME; or take smaller pieces"
    )
    if note := mend_onednn(error, rank):
        lines.append(note)
    return OutOfMemoryError("\n".join(lines))


def _named_values(error: BaseException, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the rank's variables, and for the local variables of the person's functions in
    the traceback."""
    for name, value in variables.items():
        if not name.startswith("_"):
            yield name, value
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename) and frame.f_locals is not frame.f_globals:
            for name, value in frame.f_locals.items():
                yield f"{name} in {frame.f_code.co_name}()", value
