"""Waiting for the end of work in threads, with interrupts."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

from nbgpu.client.runs.ending import Completion


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
