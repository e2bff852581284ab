"""Writes a run's metrics for TensorBoard: `tensorboard --logdir nbgpu_runs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from nbgpu.engine.logs.histograms import Histograms
from nbgpu.run_folder import names
from nbgpu.run_folder.metrics_table import EpochSummary, MetricsRow, epoch_values, step_values, steps_of

FOLDER = "tensorboard"
NUM_BINS = 64
"""torch's default has more than a thousand bins, and writes each edge as eight bytes."""


class TensorBoardLog:
    """Writes scalars and histograms into `tensorboard/` in the run's folder.

    Args:
        folder: the run's folder.
        known_step: the step after which the run continues, 0 at its beginning; TensorBoard hides later steps
            of an earlier log.
        histograms: the trainer's values of weights and gradients.
    """

    def __init__(self, folder: Path, known_step: int, histograms: Histograms) -> None:
        self._histograms = histograms
        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=known_step + 1)
        if not known_step:
            # Four spaces make the text a code block in Markdown.
            lines = (folder / names.SETTINGS).read_text().splitlines()
            self._writer.add_text("settings", "\n".join(f"    {line}" for line in lines))

    def take(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        """Write the values of steps and epochs, and the histograms that were copied since the last call."""
        for step, step_rows in steps_of(rows):
            self._add(step_values(step_rows), step, step_rows[0].time_s)
        for epoch in epochs:
            self._add(epoch_values(epoch), epoch.last_step)
        for step, tensors in self._histograms.take_new():
            for name, values in tensors.items():
                if len(values):
                    self._writer.add_histogram(name, values, step, bins=NUM_BINS)
        self._writer.flush()

    def close(self) -> None:
        self.take([], [])
        self._writer.close()

    def _add(self, values: dict[str, float], step: int, time_s: float | None = None) -> None:
        # One event for all values costs a tenth of one `add_scalar` for each.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        files: Any = self._writer.file_writer
        files.add_summary(summary, step, time_s)
