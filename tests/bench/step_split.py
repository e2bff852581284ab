"""What splitting the time of a step costs by itself: its clock readings, futures and numbers, without a step.

The processor's time of this process is measured, which other work on the machine lengthens little.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbgpu.engine.logs.profiler import Profiler
from nbgpu.engine.model.bucket_hooks import BucketHook
from nbgpu.engine.model.moments import Anchors
from nbgpu.engine.model.transfers import Transfers
from nbgpu.engine.training.step_metrics import StepClock

_NUM_STEPS = 3000
_NUM_PASSES = 5


class _Bucket:
    def __init__(self) -> None:
        self._gradients = torch.zeros(1000)

    def buffer(self) -> Tensor:
        return self._gradients


def added_us(num_buckets: int) -> list[float]:
    """The microseconds that the split adds to a step with so many buckets, for each of some passes."""
    device = torch.device("cpu")
    transfers = Transfers(device)
    hook = transfers.noting(_sent_at_once)
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(range(0), Path(folder), 0, device, lambda *_, **__: None)
        return [
            _step_us(profiler, transfers, hook, Anchors(device), num_buckets)
            - _step_us(profiler, transfers, hook, None, num_buckets)
            for _ in range(_NUM_PASSES)
        ]


def _sent_at_once(_: None, bucket: Any) -> torch.futures.Future[Tensor]:
    sent: torch.futures.Future[Tensor] = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


def _step_us(
    profiler: Profiler, transfers: Transfers, hook: BucketHook, anchors: Anchors | None, num_buckets: int
) -> float:
    bucket = _Bucket()
    begun_s = time.process_time()
    for _ in range(_NUM_STEPS):
        clock = StepClock(profiler, anchors, transfers)
        for part in ("data", "agreement", "forward", "backward"):
            clock.enter(part)  # type: ignore[arg-type]
        for _ in range(num_buckets):
            hook(None, bucket).wait()
        clock.enter("waiting")
        clock.enter("optimizer")
        clock.end()
        json.dumps(clock.seconds())
    return (time.process_time() - begun_s) / _NUM_STEPS * 1e6
