"""A run's numbers in Weights & Biases, and the process that talks to it.

The process is a separate one, `python -m nbgpu.engine.logs.wandb_log RUN_FOLDER`, because W&B starts threads
and further processes, makes temporary folders and may wait for a network, which a rank should not do. It
reads one JSON object a line, {"step": 7, "values": {...}}, and ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from nbgpu.errors import RunError
from nbgpu.machine import descendants, interpreter
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.metrics_table import EpochSummary, MetricsRow, epoch_values, step_values, steps_of

_PATIENCE_S = 60.0


class WandBLog:
    """Writes to `wandb/` in the run's folder; with wandb='online' W&B uploads the data at once.

    Args:
        folder: the run's folder, whose name is the run's id in W&B, and whose settings W&B shows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the log
        self._process = subprocess.Popen(
            interpreter.command("nbgpu.engine.logs.wandb_log", str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
            # W&B writes its files when it ends, so that the process must end by itself if the rank is killed.
            env=os.environ | {descendants.FINISHES_ALONE: "1"},
        )

    def take(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        """Send the values of steps and epochs to W&B's process; RunError with its last output if it has
        ended."""
        # Without the time of the measurement W&B would take the time of the call.
        by_step = {
            step: {**step_values(step_rows), "_timestamp": step_rows[0].time_s}
            for step, step_rows in steps_of(rows)
        }
        for epoch in epochs:
            by_step.setdefault(epoch.last_step, {}).update(epoch_values(epoch))
        lines = [
            json.dumps({"step": step, "values": values}) + "\n" for step, values in sorted(by_step.items())
        ]
        assert self._process.stdin is not None
        try:
            self._process.stdin.writelines(lines)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait()
            raise RunError(self._last_output()) from None

    def close(self) -> None:
        """End W&B's process and wait for it, at most `_PATIENCE_S`: it may still upload."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            failed = self._process.wait(_PATIENCE_S) != 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RunError(
                f"it did not end within {_PATIENCE_S:.0f} s; `wandb sync` sends what is in {self._folder / 'wandb'}"
            ) from None
        if failed:
            raise RunError(self._last_output())
        self._errors.close()

    def _last_output(self) -> str:
        """Return the last line that W&B's process has written to standard error; close the file."""
        with self._errors as file:
            file.seek(0)
            lines = [line.strip() for line in file if line.strip()]
        return lines[-1] if lines else f"its process ended with {self._process.returncode}"


def main(folder: Path) -> None:
    """Log each line of standard input to W&B, in the run with the folder's name, until the input ends."""
    # Stopping a cell or a run must not stop this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: SimpleQueue[str | None] = SimpleQueue()
    # Lines are read at once, so that the rank never waits for W&B.
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    _, config = runs.read_settings(folder)
    if config.wandb == "offline":
        # Otherwise W&B looks up its own servers even when offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    run = wandb.init(
        mode="online" if config.wandb == "online" else "offline",
        project=config.wandb_project,
        entity=config.wandb_entity or None,
        name=config.wandb_name or folder.name,
        id=folder.name,
        resume="allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # the ranks measure memory and utilization themselves
            x_disable_machine_info=config.wandb == "offline",
        ),
    )
    while (line := lines.get()) is not None:
        record = json.loads(line)
        run.log(record["values"], step=record["step"])
    run.finish()


def _read(lines: SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    # Older versions leave a socket behind in the folder of temporary files.
    with tempfile.TemporaryDirectory(prefix="nbgpu-wandb-") as place:
        os.environ["TMPDIR"] = tempfile.tempdir = place
        main(Path(sys.argv[1]))
