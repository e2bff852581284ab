"""The thread on rank 0 that writes a run's log files: metrics.csv, epochs.jsonl, TensorBoard, W&B.

It reads the ranks' own files, so that logging costs the steps nothing. A problem with a log is reported once,
and does not end the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from nbgpu.config import TrainConfig
from nbgpu.engine.logs.histograms import Histograms
from nbgpu.engine.logs.wandb_log import WandBLog
from nbgpu.run_folder import names
from nbgpu.run_folder.metrics_files import MetricsWriter, Sink
from nbgpu.run_folder.recorder import Recorder

_PERIOD_S = 1.0
_POLL_PERIOD_S = 0.02
_PATIENCE_S = 5.0
_PATIENCE_AFTER_FAILURE_S = 1.0
"""Shorter, because some ranks of a failed run may never record their end, and the notebook rewrites its
files."""


class LogWriter:
    """Follows the records of all ranks until the run is over.

    Args:
        config: the settings.
        folder: the run's folder.
        recorder: rank 0's recorder, which gets notes about problems.
    """

    def __init__(self, config: TrainConfig, folder: Path, recorder: Recorder) -> None:
        self._config = config
        self._folder = folder
        self._recorder = recorder
        self._histograms = Histograms(config.histograms_every if config.tensorboard else 0)
        self._closing = threading.Event()
        self._patience_s = _PATIENCE_S
        self._thread = threading.Thread(target=self._run, name="nbgpu-log-files", daemon=True)
        self._thread.start()

    def look_at(self, step: int, model: nn.Module) -> None:
        """Copy weights and gradients for histograms, at steps that are due. Call when the gradients of a step
        are complete."""
        if self._histograms.due(step):
            self._histograms.take(step, model)

    def close(self, failed: bool) -> None:
        """Write the remaining records, once every rank has recorded its end; afterwards the files are
        complete."""
        if failed:
            self._patience_s = _PATIENCE_AFTER_FAILURE_S
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._update_until_closed()
        except Exception as error:  # noqa: BLE001 - training continues without logs, and a note says so
            self._recorder.event("note", f"the run's logs are not written any more: {error!r}")

    def _update_until_closed(self) -> None:
        """Update the log files once a second until `close`, then wait a while for the last records of all
        ranks, and finish the files."""
        writer: MetricsWriter | None = None
        while not self._closing.wait(_PERIOD_S):
            writer = writer or self._open()
            if writer is not None:
                writer.update()
        writer = writer or self._open()
        if writer is None:
            return
        give_up_s = time.monotonic() + self._patience_s
        writer.update()
        while not writer.over and time.monotonic() < give_up_s:
            time.sleep(_POLL_PERIOD_S)
            writer.update()
        writer.finish()

    def _open(self) -> MetricsWriter | None:
        """Open the log files; None until the ranks have checked the data, which is before the first step."""
        if not (self._folder / names.INFO).exists():
            return None
        more: dict[str, Callable[[int], Sink]] = {}
        if self._config.tensorboard:
            more["TensorBoard's log"] = self._tensorboard
        if self._config.wandb != "off":
            more["W&B's log"] = lambda known_step: WandBLog(self._folder)
        return MetricsWriter(self._folder, more, lambda text: self._recorder.event("note", text))

    def _tensorboard(self, known_step: int) -> Sink:
        # The package takes a second to import, and is not always installed.
        from nbgpu.engine.logs.tensorboard_log import TensorBoardLog

        return TensorBoardLog(self._folder, known_step, self._histograms)
