"""Profiles some steps of a run: a trace file for each rank, and a breakdown of the steps' time."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nbgpu.engine.logs.timeline import PREFIX, Breakdown, Part, breakdown
from nbgpu.run_folder import names

_log = logging.getLogger("nbgpu.profiler")


class Profiler:
    """Runs torch's profiler for the steps of one window, and does nothing in all others.

    A problem with the profiler is reported, and does not end the run. No trace is written if a failure
    interrupts the window, because the steps after it are repeated and not typical, or if the run ends within
    the window.

    Args:
        steps: the window, counted from 1.
        folder: the run's folder.
        rank: the rank that is profiled.
        device: the rank's device.
        tell: is called with (kind of event, text, detail=...).
    """

    def __init__(
        self, steps: range, folder: Path, rank: int, device: torch.device, tell: Callable[..., None]
    ) -> None:
        self._steps = steps
        self._path = folder / names.PROFILES / names.profile(rank)
        self._device = device
        self._tell = tell
        self._running: profile | None = None
        self._part: record_function | None = None
        """The part of the step that has begun."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Return a context for the step with this number, counted from 1."""
        return self._profiled(step) if step in self._steps else nullcontext()

    def enter(self, part: Part) -> None:
        """End the current part of the step, and begin another."""
        if self._running is None:
            return
        self._end_part()
        self._part = record_function(PREFIX + part)
        self._part.__enter__()

    def close(self, step: int) -> None:
        """Drop the window if the run ends within it, after this step."""
        if self._running is not None:
            self._drop(f"after step {step}")

    def _end_part(self) -> None:
        if self._part is not None:
            self._part.__exit__(None, None, None)
            self._part = None

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Profile one step of the window; begin with the first one, and write the trace after the last
        one."""
        if step == self._steps.start:
            self._start()
        if self._running is None:
            # The profiler did not start.
            yield
            return
        try:
            with record_function(PREFIX + "step"):
                yield
                self._end_part()
                if step == self._steps[-1] and self._device.type == "cuda":
                    # The GPU's outstanding work belongs to this step.
                    torch.cuda.synchronize(self._device)
        except BaseException:
            self._drop(f"at step {step}")
            raise
        if step == self._steps[-1]:
            self._finish()

    def _start(self) -> None:
        """Start torch's profiler; a note is recorded if it does not start."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            running = profile(activities=activities)
            running.start()
        except RuntimeError as error:
            # A person's cell may be running a profiler.
            self._tell("note", f"the steps cannot be profiled: {error}")
            return
        self._running = running

    def _drop(self, where: str) -> None:
        """End the profiler without a trace, for good, and record where the window was cut off."""
        self._end_part()
        note = f"the profile of steps {self._steps[0]} to {self._steps[-1]} was cut off {where}"
        running, self._running, self._steps = self._running, None, range(0)
        assert running is not None
        try:
            running.stop()
        except RuntimeError as error:
            note = f"{note}; {error}"
        self._tell("note", note)

    def _finish(self) -> None:
        """End the profiler, write the trace of the window, and record the breakdown of the steps' time."""
        running, self._running = self._running, None
        assert running is not None
        first, last = self._steps[0], self._steps[-1]
        try:
            running.stop()
            self._path.parent.mkdir(exist_ok=True)
            running.export_chrome_trace(str(self._path))
            parts = _read(self._path)
        except (OSError, RuntimeError, ValueError) as error:
            self._tell("note", f"the profile of steps {first} to {last} was lost: {error}")
            return
        text = f"steps {first} to {last}, {parts.in_words()}"
        trace = f"{names.PROFILES}/{self._path.name}"
        self._tell("profile", text, steps=[first, last], trace=trace, **parts.to_json())


def _read(path: Path) -> Breakdown:
    with gzip.open(path, "rt") as file:
        return breakdown(json.load(file)["traceEvents"])
