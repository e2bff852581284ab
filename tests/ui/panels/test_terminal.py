"""What a terminal shows of a run, and what a pipe gets instead."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest
import warm_start
from recorded import RecordedRun
from rich.console import Console

from nbgpu.protocol.records import Event
from nbgpu.ui.run import terminal


def shown(run: Any, is_terminal: bool) -> str:
    """All that was written, without what moves the cursor and colours."""
    file = io.StringIO()
    terminal.follow(run, Console(file=file, force_terminal=is_terminal, width=140, height=40))
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_a_terminal_has_a_table_of_the_ranks(tmp_path: Path) -> None:
    run: Any = RecordedRun(tmp_path, steps=60, step_s=0.01)
    text = shown(run, is_terminal=True)
    run.wait(30)
    assert "step 60 of 60" in text
    assert "epoch 3 of 3" in text
    assert "validation loss" in text
    assert re.search(
        r"0\s+GPU 0 NVIDIA H200\s+finished\s+60\s+0\.\d+\s+\d+\.\d\s+\S+\s+4\d\.\d/139 GiB\s+\d+ %", text
    )
    assert "Rank 1 is the slowest" in text
    # What happened stands above it, once.
    assert text.count("step 40: checkpoint: step-40") == 1
    # The result, as a table.
    assert re.search(r"trilinear\s+21\.9\s+0\.8", text)


def test_a_pipe_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_PERIOD_S", 0.1)
    run: Any = RecordedRun(tmp_path, steps=60, step_s=0.02)
    lines = shown(run, is_terminal=False).splitlines()
    run.wait(30)
    assert sum("autoencoder: training, step" in line for line in lines) >= 2
    assert lines[-1].startswith("autoencoder: finished, step 60 of 60")
    assert any(line == "step 40: checkpoint: step-40" for line in lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_result_keeps_its_numbers_and_its_verdict_at_80_columns(
    tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = RecordedRun(tmp_path, steps=2, step_s=0.01)
    run.wait(30)
    measures = {f"a long name of measure {index}": 1.2345e-05 * index for index in range(1, 6)}
    detail = {
        "note": "The network has 9.2 times less squared error than the copy, in a sentence that is longer than a line.",
        "table": {"network": measures, "copy of the mask": measures},
        "weights": f"of step 2: {tmp_path}",
    }
    result = Event(0, 99, 0.0, 2, "result", "held out", detail)
    monkeypatch.setattr(run.reader, "batches", lambda _: iter([([result], None)]))
    file = io.StringIO()
    terminal.follow(run, Console(file=file, force_terminal=is_terminal, width=80, height=40))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "…" not in text.split("step 2 of 2")[0]
    for index in range(1, 6):
        assert text.count(f"{1.2345e-05 * index:.4g}") == 2
    assert "9.2 times less squared error" in " ".join(text.split())
    # A path stays whole, to be copied, and words do too.
    assert str(tmp_path) in text
    words = {"sentence", "measure", "squared"}
    assert words <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_says_who_waits_for_whom(tmp_path: Path, is_terminal: bool) -> None:
    run: Any = RecordedRun(tmp_path, steps=20, step_s=0.05)
    run.hang = "rank 0 waits in DDP backward, step 3, for 7 s; rank 1 is at read, data.py line 5"
    assert run.hang in shown(run, is_terminal)
    run.wait(30)


@pytest.mark.long
def test_a_rank_that_is_replaced_is_told_under_nbgpu_train(tmp_path: Path) -> None:
    flags = ["--gpus", "none", "--data", "phantoms", "--patch-size", "16", "--num-phantoms", "16"]
    flags += ["--steps", "100000", "--val-every", "0", "--threads", "1", "--runs-dir", str(tmp_path)]
    log = tmp_path / "said"
    with (
        log.open("w") as said,
        subprocess.Popen(
            [sys.executable, "-m", "nbgpu.cli", "train", "autoencoder", *flags], stdout=said, stderr=said
        ) as process,
    ):
        try:
            records = wait_for(lambda: next(tmp_path.glob("*/rank1.jsonl"), None))
            wait_for(lambda: '"loss"' in records.read_text())
            os.kill(pid_of_rank(process.pid, records), signal.SIGKILL)
            wait_for(lambda: "goes on after step" in log.read_text())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(400)
    (line,) = [line for line in log.read_text().splitlines() if "heal: " in line]
    assert "rank 1 was killed by SIGKILL" in line
    assert "It was replaced" in line


def wait_for(look: Callable[[], Any]) -> Any:
    give_up_s = time.monotonic() + 300
    while not (found := look()):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    return found


def pid_of_rank(pid: int, records: Path) -> int:
    """The process, of those that a process has started, that writes a rank's records."""
    family = [psutil.Process(member) for member in warm_start.family_of(pid)]
    (found,) = [p.pid for p in family if records in {Path(file.path) for file in p.open_files()}]
    return found


@pytest.mark.long
def test_ctrl_c_in_a_real_terminal_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    settings = {
        "--gpus": "none",
        "--data": "phantoms",
        "--patch-size": "16",
        "--num-phantoms": "16",
        "--steps": "100000",
        "--val-every": "0",
        "--threads": "1",
        "--runs-dir": str(tmp_path),
    }
    flags = [part for flag in settings.items() for part in flag]
    process = pexpect.spawn(
        sys.executable,
        ["-m", "nbgpu.cli", "train", "autoencoder", *flags],
        # The narrowest window that people have: nothing is cut off in it, and the learning rate is left out.
        dimensions=(24, 80),
        env={**os.environ, "COLUMNS": "80"},
        timeout=270,
    )
    try:
        process.expect(r"CPU rank 1 +training +[1-9]\d* +0\.\d+ +\d+\.\d +\d+\.\d/\d+ GiB +\d+ %")
        process.sendintr()
        process.expect("stopping after this step, with a checkpoint")
        process.expect("stopped at step ")
        process.expect(pexpect.EOF)
    finally:
        process.close(force=True)
    assert process.exitstatus == 0
    (run,) = tmp_path.iterdir()
    assert list((run / "checkpoints").iterdir())
    assert (run / "report.html").exists()
