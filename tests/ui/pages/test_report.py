"""The report of runs that no notebook has seen, in a real Chromium that may reach nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import chromium
from lab import browser_page
from playwright.sync_api import Page
from recorded import RecordedRun

from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.errors import ConfigError, RunError
from nbgpu.protocol.records import RankFailure
from nbgpu.ui.run.snapshot import write_report
from nbgpu.ui.run.stored import StoredRun

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "threads": 1,
    "val_every": 2,
}


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    path = chromium()
    assert path is not None, "the marker 'browser' skips where there is none"
    with browser_page(path, tmp_path) as page:
        yield page


def opened(page: Page, report: Path) -> str:
    """The text of the page, whose charts are drawn; nothing but the file was asked for, and nothing
    complained."""
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_selector(".scatterlayer .trace")
    page.wait_for_timeout(500)
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert complaints == []
    broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
    assert broken == 0
    return page.inner_text("main")


def trainer(folder: Path, **settings: Any) -> list[str]:
    toml = folder / "run.toml"
    config = train_config("autoencoder", **{**SMALL, "runs_dir": str(folder / "runs"), **settings})
    write_toml(toml, ClusterConfig(gpus="none"), config)
    return [sys.executable, "-m", "nbgpu.engine.train", str(toml)]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}


def run_folder(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.long
@pytest.mark.browser
def test_a_run_without_a_notebook_has_a_report_for_the_asking(page: Page, tmp_path: Path) -> None:
    done = subprocess.run(
        trainer(tmp_path, steps=6, profile="3:4"),
        check=True,
        capture_output=True,
        text=True,
        timeout=360,
        env=environment(tmp_path),
    )
    folder = run_folder(tmp_path)
    assert f"nbgpu report {folder}" in done.stdout
    assert not (folder / "report.html").exists()
    command = [sys.executable, "-m", "nbgpu.cli", "report", str(folder)]
    told = subprocess.check_output(command, text=True, timeout=180)
    assert told.strip() == str(folder / "report.html")
    text = opened(page, folder / "report.html")
    assert "autoencoder: finished, step 6 of 6" in text
    for section in (
        "Result",
        "Curves",
        "Epochs",
        "Where the time went",
        "Settings",
        "Devices",
        "Versions",
        "Events",
    ):
        assert f"\n{section}\n" in text
    for words in (
        "Steps 3 to 4.",
        "batch_size",
        "samples for each rank",
        "torch",
        "val psnr_db",
        "reconstruction",
    ):
        assert words in text
    titles = page.locator("#charts .annotation-text").all_text_contents()
    assert {"Loss", "Memory (GiB)", "Throughput (samples/s)"} <= set(titles)


@pytest.mark.long
@pytest.mark.browser
def test_a_run_that_was_killed_has_a_report_too(page: Page, tmp_path: Path) -> None:
    with (tmp_path / "told").open("w") as told:
        process = subprocess.Popen(
            trainer(tmp_path, steps=100_000), env=environment(tmp_path), stdout=told, stderr=told
        )
    try:
        give_up_s = time.monotonic() + 300
        while not list(tmp_path.glob("runs/*/epochs.jsonl")):
            assert process.poll() is None, (tmp_path / "told").read_text()
            assert time.monotonic() < give_up_s, (tmp_path / "told").read_text()
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    stored = StoredRun(run_folder(tmp_path))
    assert stored.status in ("training", "validating")
    text = opened(page, write_report(stored))
    assert "the run goes on, or was killed" in text
    assert "\nEpochs\n" in text


@pytest.mark.browser
def test_a_failure_is_in_the_report_with_its_traceback(page: Page, tmp_path: Path) -> None:
    run: Any = RecordedRun(tmp_path, steps=20, step_s=0.002)
    run.wait(30)
    run.status = "failed"
    run.failures = [RankFailure(1, "ValueError", "on <purpose>", "Traceback: \x1b[32mline\x1b[39m 7")]
    text = opened(page, write_report(run))
    assert "autoencoder: failed, step 20 of 20" in text
    assert "rank 1: ValueError: on <purpose>" in text
    assert "Traceback: line 7" in text


def test_a_folder_of_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*run\.toml"):
        StoredRun(tmp_path)
    write_toml(tmp_path / "run.toml", ClusterConfig(), train_config("autoencoder"))
    with pytest.raises(RunError, match=r"no run_info\.json"):
        StoredRun(tmp_path)
