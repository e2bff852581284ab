"""The process that talks to Weights & Biases for a run: `python -m nbgpu.engine.logs.wandb_process
RUN_FOLDER`.

It is a separate process, because W&B starts threads and further processes, makes temporary folders and may
wait for a network, none of which belongs in a rank. It reads one JSON object a line, {"step": 7, "values":
{...}}, and ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue

from nbgpu.run_folder import folder as runs


def main(folder: Path) -> None:
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
