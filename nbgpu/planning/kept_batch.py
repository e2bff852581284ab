"""How a run keeps the samples of a step when it goes on with another number of ranks."""

from __future__ import annotations

from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.text.ranks import count_of_ranks


def on_other_ranks(config: TrainConfig, num_before: int, num_now: int) -> tuple[dict[str, Any], str]:
    """Return the settings that change, and what becomes of the step, in words.

    No rank takes more samples at once than before, because its memory may hold no more: what is left is
    accumulated.

    Args:
        config: the settings on the ranks from before.
        num_before: their number.
        num_now: the number of ranks from now on.
    """
    if "batch_size" in config.UNUSED:
        return {}, ""
    wanted = config.samples_per_step(num_before)
    per_rank = max(1, round(wanted / num_now))
    batch_size = next(size for size in range(min(config.batch_size, per_rank), 0, -1) if per_rank % size == 0)
    changes: dict[str, Any] = {"batch_size": batch_size, "accumulate": per_rank // batch_size}
    if config.global_batch_size is not None:
        changes["global_batch_size"] = None
    as_before = (
        f"A step has {wanted} samples as before"
        if per_rank * num_now == wanted
        else f"{wanted} samples of a step do not divide among {count_of_ranks(num_now)}: a step has {per_rank * num_now} now"
    )
    return changes, f"{as_before}, with batch_size={batch_size} and accumulate={per_rank // batch_size}."
