"""Everything that shows how far a run is shows the same: live, attached, reloaded, stopped, healed, resumed
and finished."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import nbgpu
from nbgpu.client.host import ps
from nbgpu.run_folder.progress import RunView
from nbgpu.run_folder.reader import Reader
from nbgpu.ui.run import head_view, terminal, wording
from nbgpu.ui.run.history import History
from nbgpu.ui.run.panel import Panel
from nbgpu.ui.run.snapshot import report_html
from nbgpu.ui.run.stored import StoredRun

EPOCHS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 32,
    "batch_size": 2,
    "epochs": 40,
    "val_every": 0,
    "threads": 1,
    "work_out_result": False,
}
"""A run whose number of steps nobody knows before its ranks have looked at the data."""


def drawn(run: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(terminal._Screen(run, console, []).drawn())
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def shown(run: Any) -> dict[str, set[str]]:
    """By place what it says of the run's steps."""
    history = History()
    history.add(list(Reader(run.folder, run.info.world_size, live=False).records()))
    status = Panel(run, "slot")._status()
    view = RunView(run.folder, run.info.world_size)
    view.read()
    progress = view.describe()["progress"]
    stored = StoredRun(run.folder)
    texts = {
        "panel": f"step {status['step']} of {status['total_steps']}",
        "sidebar and status bar": f"step {progress['step']} of {progress['total_steps']}",
        "nbgpu ps": next(line for line in ps.table().splitlines() if run.folder.name in line),
        "terminal": drawn(run),
        "line of a waiting cell": wording.summary(run.info, run.status, run.statuses(), history),
        "picture that stays": head_view.html(run, history),
        "report": report_html(stored),
        "repr": repr(run),
    }
    return {place: set(re.findall(r"step \d+ of \d+", text)) for place, text in texts.items()}


def is_everywhere(run: Any, step: int, total: int) -> None:
    places = shown(run)
    assert places == {key: {f"step {step} of {total}"} for key in places}
    # In a window of 80 columns `nbgpu ps` cuts nothing off, and an ended run is no running one.
    lines = ps.table(80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum(f"{run.folder.name}, {run.status}, step {step} of {total}" in line for line in lines) == 1


def wait_for(look: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 300
    while not look():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


@pytest.mark.one_host("nbgpu ps reads the folders of this host")
def test_all_places_say_the_same_of_a_run(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **EPOCHS)
    wait_for(lambda: min(s.step for s in run.statuses()) > 3)
    run.pause()
    # The run's state is that of the first rank that has paused, while another one may still do its step.
    wait_for(lambda: {s.state for s in run.statuses()} == {"paused"})
    # Numbers come to the notebook some time after they are in the files.
    wait_for(lambda: len(set[str]().union(*shown(run).values())) == 1)
    step, total = run.statuses()[0].step, run.info.total_steps
    assert total == 40 * run.info.steps_per_epoch > 40
    is_everywhere(run, step, total)
    # The handle that a kernel gets which attaches to the cluster while the run goes on.
    attached = cluster2.parts.runs.handle(run.folder)
    wait_for(lambda: attached.status == "paused")
    is_everywhere(attached, step, total)

    run.stop()
    run.wait(400)
    assert run.status == "stopped"
    is_everywhere(run, step, total)
    # A kernel that has just started knows the run from its folder.
    is_everywhere(cluster2.parts.runs.handle(run.folder), step, total)

    # On request it is finished with what was done.
    run.work_out_result().wait(400)
    assert run.status == "finished"
    is_everywhere(run, step, step)

    resumed = cluster2.train(
        "autoencoder", runs_dir=str(tmp_path / "resumed"), **{**EPOCHS, "epochs": 12}, resume=str(run.folder)
    ).wait(400)
    assert resumed.status == "finished"
    is_everywhere(resumed, max(step, resumed.info.total_steps), resumed.info.total_steps)


@pytest.mark.long
@pytest.mark.one_host("nbgpu ps reads the folders of this host")
def test_all_places_say_the_same_of_a_run_that_was_healed(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {**EPOCHS, "epochs": 12, "checkpoint_every": 8}
    run = cluster2.train("autoencoder", runs_dir=str(tmp_path), **settings)
    wait_for(lambda: min(s.step for s in run.statuses()) > 12)
    os.kill(cluster2.pids[1], signal.SIGKILL)
    # It goes on from a checkpoint, and does some steps twice.
    assert run.wait(400).status == "finished"
    assert any(
        "was killed by SIGKILL" in str(record) for record in Reader(run.folder, 2, live=False).records()
    )
    total = run.info.total_steps
    assert total == 12 * run.info.steps_per_epoch
    is_everywhere(run, total, total)
    is_everywhere(cluster2.parts.runs.handle(run.folder), total, total)
