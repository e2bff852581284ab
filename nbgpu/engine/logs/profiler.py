"""Profiles some steps of a run: a trace file for each rank, and where the steps' time went."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nbgpu.engine.logs.timeline import PREFIX, Breakdown, Part, breakdown

_log = logging.getLogger("nbgpu.profiler")

FOLDER = "profile"
"""In the run's folder: `rankN.trace.json.gz`, which chrome://tracing and ui.perfetto.dev open."""


class Profiler:
    """Runs torch's profiler for the steps of one window, and does nothing in all others.

    What goes wrong with it is told, and is no reason to lose the run. A window that is cut off by a failure is
    dropped: what follows is done anew, and not what a step usually does.

    Args:
        steps: the window, counted from 1.
        folder: the run's folder.
        rank: whose steps these are.
        device: where the rank computes.
        tell: is called with (kind of event, text, detail=...).
    """

    def __init__(
        self, steps: range, folder: Path, rank: int, device: torch.device, tell: Callable[..., None]
    ) -> None:
        self._steps = steps
        self._path = folder / FOLDER / f"rank{rank}.trace.json.gz"
        self._device = device
        self._tell = tell
        self._running: profile | None = None
        self._part: record_function | None = None

    def step(self, step: int) -> AbstractContextManager[None]:
        """Goes around each step of the run, of which `step - 1` are done."""
        return self._profiled(step) if step in self._steps else nullcontext()

    def enter(self, part: Part) -> None:
        """Says which part of a step begins here, and that the one before it is over."""
        if self._running is None:
            return
        self._leave()
        self._part = record_function(PREFIX + part)
        self._part.__enter__()

    def _leave(self) -> None:
        if self._part is not None:
            self._part.__exit__(None, None, None)
            self._part = None

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        if step == self._steps.start:
            self._start()
        if self._running is None:
            yield
            return
        try:
            with record_function(PREFIX + "step"):
                yield
                self._leave()
                if step == self._steps[-1] and self._device.type == "cuda":
                    # What the GPU still has to do for this step belongs to it.
                    torch.cuda.synchronize(self._device)
        except BaseException:
            self._drop(
                f"the profile of steps {self._steps[0]} to {self._steps[-1]} was cut off at step {step}"
            )
            raise
        if step == self._steps[-1]:
            self._finish()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            running = profile(activities=activities)
            running.start()
        except RuntimeError as error:
            # A cell of the person's may be profiling.
            self._tell("note", f"the steps cannot be profiled: {error}")
            return
        self._running = running

    def _drop(self, why: str) -> None:
        self._leave()
        running, self._running = self._running, None
        if running is not None:
            try:
                running.stop()
            except RuntimeError as error:
                why = f"{why}; {error}"
        self._tell("note", why)

    def _finish(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        first, last = self._steps[0], self._steps[-1]
        try:
            running.stop()
            self._path.parent.mkdir(exist_ok=True)
            running.export_chrome_trace(str(self._path))
            found = _read(self._path)
        except (OSError, RuntimeError, ValueError) as error:
            self._tell("note", f"the profile of steps {first} to {last} was lost: {error}")
            return
        text = f"steps {first} to {last}, {found.in_words()}"
        detail: dict[str, Any] = {"steps": [first, last], "trace": f"{FOLDER}/{self._path.name}"}
        self._tell("profile", text, **detail, **found.to_json())


def _read(path: Path) -> Breakdown:
    with gzip.open(path, "rt") as file:
        return breakdown(json.load(file)["traceEvents"])
