"""Waiting for the end of work in threads, with interrupts."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.engines.other_hosts.served import Served
from nbgpu.client.runs.ending import Completion
from nbgpu.client.runs.run import Run
from nbgpu.run_folder import names


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_an_interrupt_is_raised_when_the_end_has_come_and_a_second_one_stops_again(
    num_interrupts: int,
) -> None:
    ending: Completion[str] = Completion("the work", logging.getLogger("test"))
    stops: list[bool] = []

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def stop() -> None:
        stops.append(ending.over)
        if len(stops) < num_interrupts:
            interrupt()  # the first Stop is of no use to this person
        else:
            threading.Timer(0.5, lambda: ending.complete("stopped", lambda: None)).start()

    with pytest.raises(KeyboardInterrupt):
        ending.wait(60, lambda: "going on", stop, patience_s=30, meanwhile=lambda: stops or interrupt())
    assert ending.over
    assert stops == [False] * num_interrupts


def test_a_run_whose_description_is_damaged_ends_all_the_same(tmp_path: Path) -> None:
    (tmp_path / names.INFO).write_text("{}")
    run: Any = Run.__new__(Run)
    run.folder = tmp_path
    run.reader = SimpleNamespace(close=lambda: None, statuses=lambda _: [SimpleNamespace(step=3)])
    run._watch = SimpleNamespace(follow=lambda: "failed", abandoned=False)
    run._served = Served(tmp_path, [])
    run._live = SimpleNamespace(close=lambda: None)
    run._info = SimpleNamespace(devices=(), world_size=1)
    run._preparing = None
    run._ending = Completion("the run", logging.getLogger("test"))
    run._follow_to_the_end()
    assert run._ending.over
    assert run._ending.state == "failed"
