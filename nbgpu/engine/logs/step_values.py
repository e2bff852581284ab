"""A run's metrics under their names in TensorBoard and W&B: 'train/loss', 'val/loss',
'rank0/samples_per_s'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from nbgpu.run_folder.metrics_table import VALIDATION, EpochSummary, MetricsRow, is_of_rank


def steps_of(rows: Sequence[MetricsRow]) -> Iterator[tuple[int, list[MetricsRow]]]:
    """Yield each step with its rows, which are in order."""
    for step, of_step in groupby(rows, key=lambda row: row.step):
        yield step, list(of_step)


def step_values(of_step: Sequence[MetricsRow]) -> dict[str, float]:
    """Return the metrics of one step: means over the ranks, and each rank's own times and memory."""
    values: dict[str, float] = {}
    shared: dict[str, list[float]] = {}
    for row in of_step:
        for name, value in row.values.items():
            if name.startswith(VALIDATION):
                values[f"val/{name.removeprefix(VALIDATION)}"] = value
            elif is_of_rank(name):
                values[f"rank{row.rank}/{name}"] = value
            else:
                shared.setdefault(name, []).append(value)
    return {f"train/{name}": sum(of_ranks) / len(of_ranks) for name, of_ranks in shared.items()} | values


def epoch_values(epoch: EpochSummary) -> dict[str, float]:
    """Return the metrics of an epoch, which are logged at its last step."""
    return {
        "epoch/number": float(epoch.epoch),
        "epoch/train_s": epoch.train_s,
        "epoch/samples_per_s": epoch.samples_per_s,
        "epoch/straggler_ratio": epoch.straggler_ratio,
        **{f"epoch/{name}": value for name, value in epoch.means.items()},
    }
