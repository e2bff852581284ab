"""A rank with tensors on another rank's GPU is told once. torch's count of memory is a stand-in here."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.events import EventManager, available_events

from nbgpu.engine.memory import other_gpus

LONG_S = other_gpus._SHORTEST_CELL_S


@pytest.fixture
def reserved_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What torch has reserved of each of three GPUs."""
    sizes = {0: 0, 1: 2**30, 2: 0}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "memory_reserved", sizes.__getitem__)
    return sizes


def run_cell(shell: Any, takes_s: float = LONG_S) -> None:
    shell.events.trigger("pre_run_cell", None)
    time.sleep(takes_s)
    shell.events.trigger("post_run_cell", None)


def test_it_is_told_once_with_what_to_write(
    reserved_bytes: dict[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    shell = SimpleNamespace()
    shell.events = EventManager(shell, available_events)
    other_gpus.warn_of_memory_on_other_gpus(shell, torch.device("cuda", 1))
    run_cell(shell)
    assert capsys.readouterr().err == ""
    reserved_bytes[0] = 3 * 2**29
    run_cell(shell, takes_s=0.0)  # an empty cell pays for no look
    assert capsys.readouterr().err == ""
    run_cell(shell)
    said = capsys.readouterr().err
    assert said.startswith("this rank has 1.5 GiB on cuda:0, and its own GPU is cuda:1: write .to(device)")
    assert "map_location=device" in said
    run_cell(shell)
    assert capsys.readouterr().err == ""
    assert not any(shell.events.callbacks[name] for name in ("pre_run_cell", "post_run_cell"))


def test_ranks_that_share_a_gpu_and_cpu_ranks_are_told_nothing(
    reserved_bytes: dict[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    reserved_bytes[0] = 2**30
    for device in ("cuda:0", "cpu"):
        shell = SimpleNamespace()
        shell.events = EventManager(shell, available_events)
        other_gpus.warn_of_memory_on_other_gpus(shell, torch.device(device))
        run_cell(shell)
    assert capsys.readouterr().err == ""
