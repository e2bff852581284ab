"""nbgpu's trainer as `torchrun -m nbgpu.engine.train run.toml` starts it, with the time of each step left in
a file.

torchrun --nproc-per-node=2 tests/bench/trainer.py run.toml STAMPS [--split-in-turns]

With --split-in-turns every other BLOCK_STEPS steps are not split into parts.
"""

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from nbgpu.engine import train
from nbgpu.engine.training.step_metrics import StepClock
from nbgpu.recipes.autoencoder.recipe import Autoencoder

BLOCK_STEPS = 10


def split_in_turns() -> None:
    begin = StepClock.__init__
    num_steps = 0

    def begin_or_not(self: StepClock, profiler: Any, anchors: Any, transfers: Any) -> None:
        nonlocal num_steps
        is_split = num_steps // BLOCK_STEPS % 2
        num_steps += 1
        begin(self, profiler, anchors if is_split else None, transfers)

    StepClock.__init__ = begin_or_not  # type: ignore[method-assign]


def main(settings: str, stamps: str, *options: str) -> None:
    if options:
        split_in_turns()
    if os.environ["RANK"] == "0":
        file = Path(stamps).open("ab", buffering=0)  # noqa: SIM115 - until it is killed
        loss = Autoencoder.loss

        def stamped(self: Autoencoder, *arguments: Any) -> Any:
            file.write(struct.pack("d", time.monotonic()))
            return loss(self, *arguments)

        Autoencoder.loss = stamped  # type: ignore[method-assign]
    train.main([settings])


if __name__ == "__main__":
    main(*sys.argv[1:])
