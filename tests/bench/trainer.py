"""nbgpu's trainer as `torchrun -m nbgpu.engine.train run.toml` starts it, with the time of each step left in
a file.

torchrun --nproc-per-node=2 tests/bench/trainer.py run.toml STAMPS
"""

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from nbgpu.engine import train
from nbgpu.recipes.autoencoder.recipe import Autoencoder


def main(settings: str, stamps: str) -> None:
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
