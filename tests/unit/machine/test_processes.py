"""What /proc says of a process, and what it means where /proc cannot be read."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nbgpu.machine import processes
from nbgpu.machine.processes import ProcessId


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


def test_a_process_that_cannot_be_looked_at_does_not_count_as_gone() -> None:
    own = ProcessId.of(os.getpid())
    with no_file_can_be_opened():
        with pytest.raises(OSError, match="Too many open files"):
            own.alive()
        with pytest.raises(OSError, match="Too many open files"):
            processes.is_ending(own.pid)
    assert own.alive()


def test_a_process_that_has_ended_is_gone() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        known = ProcessId.of(process.pid)
        process.kill()
    assert not known.alive()
    assert processes.is_ending(known.pid)


def test_a_real_time_signal_has_a_number_in_place_of_a_name() -> None:
    assert processes.signal_name(9) == "SIGKILL"
    assert processes.signal_name(35) == "signal 35"
